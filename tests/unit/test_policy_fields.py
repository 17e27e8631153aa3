"""Every field of the protocols that carries text: where the policy looks at it, or why not. A new
one that stands on neither list fails here: it may be a way around the policy."""

import json
from importlib import import_module
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from protos.common_pb2 import ContentPart, Message, Passage, Tool, ToolCall
from protos.tokenizer_pb2 import Chat, Pool, PromptRequest
from services.tokenizer.prompts.subjects import subjects

PROTOS = Path(__file__).parents[2] / "protos"
FILES = [import_module(f"protos.{file.stem}_pb2") for file in sorted(PROTOS.glob("*.proto"))]

# Looked at before they are in a prompt: `subjects` gives them, as the test below sees.
PROMPT = """
    ContentPart.text Message.name Message.tool_call_id Message.reasoning
    ToolCall.id ToolCall.name ToolCall.arguments Tool.name Tool.description Tool.parameters
    Passage.title Passage.text Chat.template_options PromptRequest.text Pool.Input.text
"""
# As those are called at the door: the gateway puts each into one of the above, or into one of
# retrieval's below.
DOOR = """
    ChatRequest.chat_template_kwargs CompleteRequest.text PublicEmbedRequest.texts
    PublicScoreRequest.queries PublicScoreRequest.documents PublicRerankRequest.query
    PublicRerankRequest.documents PublicClassifyRequest.texts PublicModerateRequest.texts
    CompleteRequest.Prompts.texts PublicTokenizeRequest.text
    PublicTokenizeRequest.chat_template_kwargs PublicSearchStoreRequest.query
    PublicSearchStoreRequest.queries
"""
# By retrieval, and rules of meaning (tests/unit/retrieval/test_judged.py); what it cuts a document
# into was looked at before.
RETRIEVAL = """
    EmbedRequest.texts SearchRequest.query IndexRequest.title ReadRequest.title JudgedText.text
    CutRequest.title CutChunk.title LoadRequest.filename Section.headings Section.text
    WantedVectors.texts
"""
# Of answers, while they are written (tests/unit/tokenizer/test_answer_policy.py).
ANSWER = """
    TextDelta.text TextDelta.reasoning ToolCallDelta.name ToolCallDelta.arguments
    TextLogprob.Candidate.text TextLogprob.Candidate.bytes GenerateEvent.text
    GenerateEvent.reasoning
"""
# What the client sent, told to it as the policy left it.
TOLD_BACK = """
    Echo.text Redacted.title Redacted.text TextDelta.stop PublicDetokenizeReply.text
    PublicRecord.metadata ReadPiece.text
"""
# Words of the client's own request, told to it alone in the same answer; and words of a fixed set.
# What a model made of them was looked at as its answer.
OWN_WORDS = """
    Searched.query Searched.rewritten Searched.not_reranked PublicSearchStoreReply.search_query
    PublicSearchStoreReply.not_reranked
"""
# They say what an answer must or must not be, and are in no prompt; what it becomes is looked at.
FORM = """
    Constraint.json_schema Constraint.regex Constraint.grammar Constraint.Options.texts
    SamplingOptions.stop SamplingOptions.bad_words PromptRequest.stop PromptRequest.bad_words
"""
# Names of what there is, checked against it, and words of a fixed set.
NAMES = """
    ChatRequest.model CompleteRequest.model PromptRequest.model GenerateRequest.model
    WorkRequest.model PublicEmbedRequest.model PublicScoreRequest.model PublicRerankRequest.model
    PublicClassifyRequest.model EmbedReply.model TextDelta.model ModelInfo.name WorkerStatus.model
    ToolChoice.name ToolChoice.allowed Message.role JudgedText.role SamplingOptions.delivery
    ChatRequest.vector_store_ids SearchRequest.collections IndexRequest.collection
    IndexRequest.source_id RemoveRequest.collection RemoveRequest.source_id Passage.source_id
    PublicClassifyReply.labels TextDelta.labels Cost.currency JudgeReply.Match.rule
    PublicModerateReply.Moderation.scores PublicModerateReply.judged PublicModerateReply.policy
    PublicTokenizeRequest.model PublicDetokenizeRequest.model
    PublicSearchStoreRequest.vector_store_id PublicRecord.model
    ChatRequest.FileSearch.ranker PublicSearchStoreRequest.ranker
    ChunkingStrategy.type ExpiresAfter.anchor SetAttributesRequest.collection
    SetAttributesRequest.source_id Searched.reranked PublicSearchStoreReply.reranked
    SearchRequest.embedder IndexRequest.embedder CreateVectorStoreRequest.embedding_model
    UpdateVectorStoreRequest.embedding_model ModelInfo.parent Stretch.collection
"""
# Of runs that outlive their connections (decision 0046): what the client sent, kept as it is and
# looked at anew by whoever goes on; what was told of an answer, behind the policy.
KEPT = """
    StoredRun.told StoredPrompt.question StoredPrompt.tags RunEvent.Begun.warnings
    RunEvent.Finished.warnings
"""
# Ours: ids, digests, addresses, numbers, frames of other messages, and words about a request that
# never quote it (Status.message and what becomes of it).
OURS = """
    Beside.path Beside.word Hello.host Sampling.unnamed ModelInfo.sampling
    Hello.peer Open.payload Open.traceparent LinkDown.news Item.payload Status.message
    Status.stage Status.param Status.reason Span.service Span.name Span.span_id Span.parent_id
    Span.attributes Decision.stage Decision.subject Decision.choice Decision.reasons
    Caller.request_id Caller.tenant GenerateEvent.warning EmbedRequest.policy
    SearchRequest.policy IndexRequest.policy IndexRequest.blob IndexReply.note
    ReadRequest.policy ReadRequest.blob
    LoadReply.note Refusal.words Refusal.reason Refusal.fault JudgeRequest.policy
    Resume.prompt_digest SearchReply.by_words IndexReply.embedder
    Resume.checkpoint Resume.policy Pooled.values TextDelta.prompt_digest TextDelta.checkpoint
    TextDelta.policy GenerateRequest.checkpoint WorkerStatus.id WorkerStatus.address
    WorkerStatus.role WorkerStatus.state WorkerStatus.breaker WorkRequest.transfer_id
    WorkRequest.checkpoint WorkerAddress.address WorkerAddress.host_id TokenDelta.pooled
    BlockEvents.hashes KvBegin.transfer_id KvBegin.kv_format KvBlocks.inline SharedMemory.name
    RunEvent.Admitted.headers RunEvent.Begun.model RunEvent.Failed.headers
    RunEvent.Finished.currency
    StoredCaller.Bound.limit StoredCaller.Bound.owner StoredCaller.models
    StoredCaller.permissions StoredCaller.priority StoredCaller.tenant StoredCaller.user
    StoredPrompt.delivery StoredPrompt.form StoredPrompt.param StoredPrompt.stores
    PublicSearchStoreReply.warning PublicGetRecordRequest.request_id PublicRecord.id
    PublicRecord.route PublicRecord.status PublicRecord.Span.service PublicRecord.Span.name
    PublicRecord.Span.id PublicRecord.Span.parent PublicRecord.Span.attributes
    PublicRecord.Failure.stage PublicRecord.Failure.code PublicRecord.Failure.message
    StoredRun.digest StoredRun.endpoint StoredRun.model StoredRun.request_id StoredRun.route
    Adapters.digests GenerateRequest.prompt_token_ids WorkRequest.prompt_token_ids PackedIds.ids
"""
# Of what a tenant keeps here: ids, states, and what it named itself and gets back. A file's text
# and name are looked at on their way into passages; a batch's lines as requests.
STORED = """
    AttachFileRequest.file_id AttachFileRequest.vector_store_id Batch.Error.code
    Batch.Error.message Batch.Error.param Batch.completion_window Batch.endpoint
    Batch.error_file_id Batch.id Batch.input_file_id Batch.metadata Batch.output_file_id
    Batch.status CancelBatchRequest.batch_id CancelRunRequest.run_id
    CreateBatchRequest.completion_window CreateBatchRequest.endpoint
    CreateBatchRequest.input_file_id CreateBatchRequest.metadata CreateVectorStoreRequest.file_ids
    CreateVectorStoreRequest.metadata CreateVectorStoreRequest.name DeleteFileRequest.file_id
    DeleteRunRequest.run_id DeleteVectorStoreRequest.vector_store_id Deleted.id
    DetachFileRequest.file_id DetachFileRequest.vector_store_id File.filename File.id File.purpose
    File.status FileContent.data FileExpiresAfter.anchor FollowRunRequest.run_id
    GetAttachedFileRequest.file_id
    GetAttachedFileRequest.vector_store_id GetBatchRequest.batch_id GetFileContentRequest.file_id
    GetFileRequest.file_id GetRunRequest.run_id GetVectorStoreRequest.vector_store_id
    ListAttachedFilesReply.first_id ListAttachedFilesReply.last_id ListAttachedFilesRequest.after
    ListAttachedFilesRequest.filter ListAttachedFilesRequest.order
    ListAttachedFilesRequest.vector_store_id ListBatchesReply.first_id ListBatchesReply.last_id
    ListBatchesRequest.after ListBatchesRequest.order ListFilesReply.first_id
    ListFilesReply.last_id ListFilesRequest.after ListFilesRequest.order ListFilesRequest.purpose
    ListVectorStoresReply.first_id ListVectorStoresReply.last_id ListVectorStoresRequest.after
    ListVectorStoresRequest.order PublicRun.id PublicRun.model PublicRun.status
    UploadFileRequest.data UploadFileRequest.filename UploadFileRequest.purpose VectorStore.id
    VectorStore.metadata VectorStore.name VectorStore.status VectorStoreFile.Failure.code
    VectorStoreFile.Failure.message VectorStoreFile.id VectorStoreFile.status
    VectorStoreFile.vector_store_id
    AttachFileRequest.attributes AttributeValue.text CancelFileBatchRequest.batch_id
    CancelFileBatchRequest.vector_store_id CreateFileBatchRequest.File.attributes
    CreateFileBatchRequest.File.file_id CreateFileBatchRequest.attributes
    CreateFileBatchRequest.file_ids CreateFileBatchRequest.vector_store_id
    CreateVectorStoreRequest.description FileBatch.id FileBatch.status FileBatch.vector_store_id
    Filter.Comparison.key GetFileBatchRequest.batch_id GetFileBatchRequest.vector_store_id
    IndexRequest.attributes ListAttachedFilesRequest.before ListFileBatchRequest.after
    ListFileBatchRequest.batch_id ListFileBatchRequest.before ListFileBatchRequest.filter
    ListFileBatchRequest.order ListFileBatchRequest.vector_store_id
    ListVectorStoresRequest.before Passage.attributes SetAttributesRequest.attributes
    UpdateAttachedFileRequest.attributes UpdateAttachedFileRequest.file_id
    UpdateAttachedFileRequest.vector_store_id UpdateVectorStoreRequest.metadata
    UpdateVectorStoreRequest.name UpdateVectorStoreRequest.vector_store_id
    VectorStore.description VectorStoreFile.attributes
    VectorStoreFile.Extras.note CancelReindexingRequest.vector_store_id
    ReindexVectorStoreRequest.vector_store_id VectorStore.embedding_model
    VectorStore.Reindexing.reason VectorStore.Reindexing.status
    AddConversationItemsRequest.conversation_id AddUploadPartRequest.data
    AddUploadPartRequest.upload_id CancelUploadRequest.upload_id CompleteUploadRequest.md5
    CompleteUploadRequest.part_ids CompleteUploadRequest.upload_id Conversation.id
    Conversation.metadata ConversationItems.first_id ConversationItems.last_id
    CreateConversationRequest.metadata CreateUploadRequest.filename
    CreateUploadRequest.mime_type CreateUploadRequest.purpose
    DeleteConversationItemRequest.conversation_id DeleteConversationItemRequest.item_id
    DeleteConversationRequest.conversation_id GetConversationItemRequest.conversation_id
    GetConversationItemRequest.item_id GetConversationRequest.conversation_id
    ListConversationItemsRequest.after ListConversationItemsRequest.conversation_id
    ListConversationItemsRequest.order UpdateConversationRequest.conversation_id
    UpdateConversationRequest.metadata Upload.filename Upload.id Upload.purpose Upload.status
    UploadPart.id UploadPart.upload_id
"""
KNOWN = (PROMPT, DOOR, RETRIEVAL, ANSWER, TOLD_BACK, OWN_WORDS, FORM, NAMES, KEPT, OURS, STORED)


def _texts(message: Descriptor) -> list[str]:
    """The fields of a message, and of those within it, that hold text or bytes."""
    found = []
    for field in message.fields:
        values = [field]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            values = list(field.message_type.fields)
        if any(v.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES) for v in values):
            found.append(field.full_name.split(".v1.", 1)[1])
    for inner in message.nested_types:
        if not inner.GetOptions().map_entry:
            found += _texts(inner)
    return found


def test_every_text_of_the_protocols_is_looked_at_or_has_a_reason_not_to_be() -> None:
    messages = [m for file in FILES for m in file.DESCRIPTOR.message_types_by_name.values()]
    there = [name for message in messages for name in _texts(message)]
    listed = [name for names in KNOWN for name in names.split()]
    assert sorted(listed) == sorted(there)


def test_what_is_listed_as_looked_at_is() -> None:
    said = {name: f"{name}!" for name in PROMPT.split()}

    def quoted(name: str) -> str:
        return json.dumps({"a": said[name]})

    call = ToolCall(
        id=said["ToolCall.id"],
        name=said["ToolCall.name"],
        arguments=quoted("ToolCall.arguments"),
    )
    message = Message(
        role="assistant",
        content=[ContentPart(text=said["ContentPart.text"])],
        name=said["Message.name"],
        tool_call_id=said["Message.tool_call_id"],
        reasoning=said["Message.reasoning"],
        tool_calls=[call],
    )
    tool = Tool(
        name=said["Tool.name"],
        description=said["Tool.description"],
        parameters=quoted("Tool.parameters"),
    )
    passage = Passage(title=said["Passage.title"], text=said["Passage.text"])
    chat = Chat(
        messages=[message],
        tools=[tool],
        passages=[passage],
        template_options=quoted("Chat.template_options"),
    )
    pool = Pool(inputs=[Pool.Input(text=said["Pool.Input.text"])])
    pool.queries.add(text="asked")
    whole = [
        PromptRequest(chat=chat),
        PromptRequest(text=said["PromptRequest.text"]),
        PromptRequest(pool=pool),
    ]
    seen = "\n".join(one.text for request in whole for one in subjects(request, lambda _: ""))
    assert [name for name, text in said.items() if text not in seen] == []
    assert "asked" in seen
