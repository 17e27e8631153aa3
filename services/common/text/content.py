"""What a message says, which comes in parts."""

from protos.common_pb2 import ContentPart, Message


def text_of(message: Message) -> str:
    return "".join([part.text for part in message.content])


def said(role: str, text: str, name: str = "") -> Message:
    """A message of one text."""
    return Message(role=role, content=[ContentPart(text=text)], name=name)
