"""The dashboards: what is asked on each, in the order in which somebody looks."""

from deploy.observability.grafana.panels import Page, Panel

_MODEL = ("model", "label_values(penstock_gateway_generations_total, model)")
_RATE = "[$__rate_interval]"


def _quantile(q: float, histogram: str, by: str, matched: str = "") -> str:
    return f"histogram_quantile({q}, sum by ({by}, le) (rate({histogram}_bucket{matched}{_RATE})))"


def _rate(counter: str, by: str, matched: str = "") -> str:
    return f"sum by ({by}) (rate({counter}{matched}{_RATE}))"


def _total(counter: str, matched: str = "") -> str:
    return f"sum(rate({counter}{matched}{_RATE}))"


_OF_MODEL = '{model=~"$model"}'

OVERVIEW = Page(
    "overview",
    "overview",
    "Whether it is well: the service levels, load, and what is missing.",
    variables=[_MODEL],
    rows=[
        (
            "Now",
            [
                Panel(
                    "Failed (1 h)",
                    "percentunit",
                    "Level: 0.1 %. By the platform's fault; refused and cancelled ones do not count.",
                    [(f"penstock:generation_failures:ratio_rate1h{_OF_MODEL}", "{{model}}")],
                    now=True,
                ),
                Panel(
                    "First token p95",
                    "s",
                    "Level: 300 ms.",
                    [(f"penstock:time_to_first_token_seconds:p95_rate5m{_OF_MODEL}", "{{model}}")],
                    now=True,
                ),
                Panel(
                    "Tokens/s of an answer, p50",
                    "short",
                    "Level: 40.",
                    [(f"penstock:output_tokens_per_second:p50_rate5m{_OF_MODEL}", "{{model}}")],
                    now=True,
                ),
                Panel(
                    "Waiting",
                    "short",
                    "Requests that wait for a worker's slot. Level: 25.",
                    [("penstock:queued_requests:sum", "waiting")],
                    now=True,
                ),
                Panel(
                    "Alerts",
                    "short",
                    "That fire now.",
                    [('sum(ALERTS{alertstate="firing"}) or vector(0)', "firing")],
                    now=True,
                ),
            ],
        ),
        (
            "Service levels",
            [
                Panel(
                    "Error budget's burn rate",
                    "short",
                    "1: just what the level allows. 14.4 wakes somebody.",
                    [
                        (
                            f"penstock:generation_failures:ratio_rate1h{_OF_MODEL} / 0.001",
                            "failed {{model}}",
                        ),
                        (
                            f"penstock:slow_first_tokens:ratio_rate1h{_OF_MODEL} / 0.05",
                            "slow first tokens {{model}}",
                        ),
                    ],
                ),
                Panel(
                    "First token",
                    "s",
                    "From a generation's start to its first text.",
                    [
                        (
                            _quantile(
                                q,
                                "penstock_gateway_time_to_first_token_seconds",
                                "model",
                                _OF_MODEL,
                            ),
                            name,
                        )
                        for q, name in (
                            (0.5, "p50 {{model}}"),
                            (0.95, "p95 {{model}}"),
                            (0.99, "p99 {{model}}"),
                        )
                    ],
                ),
                Panel(
                    "Between tokens",
                    "s",
                    "Mean gap of the tokens of one arrival.",
                    [
                        (
                            _quantile(
                                q,
                                "penstock_gateway_inter_token_latency_seconds",
                                "model",
                                _OF_MODEL,
                            ),
                            name,
                        )
                        for q, name in ((0.5, "p50 {{model}}"), (0.95, "p95 {{model}}"))
                    ],
                ),
            ],
        ),
        (
            "Load",
            [
                Panel(
                    "Generations by outcome",
                    "reqps",
                    "",
                    [
                        (
                            _rate("penstock_gateway_generations_total", "outcome", _OF_MODEL),
                            "{{outcome}}",
                        )
                    ],
                ),
                Panel(
                    "Tokens",
                    "short",
                    "A second, over all tenants; cached ones are part of the prompts.",
                    [(_rate("penstock_gateway_tokens_total", "kind", _OF_MODEL), "{{kind}}")],
                ),
                Panel(
                    "Replicas",
                    "short",
                    "That tell their metrics.",
                    [("count by (service) (penstock_build_info)", "{{service}}")],
                ),
                Panel(
                    "Versions",
                    "short",
                    "More than one: an upgrade is under way.",
                    [("count by (version) (penstock_build_info)", "{{version}}")],
                ),
            ],
        ),
        (
            "Machines",
            [
                Panel(
                    "Processor",
                    "short",
                    "Cores in use.",
                    [
                        (
                            f'sum by (instance) (rate(process_cpu_seconds_total{{job="penstock"}}{_RATE}))',
                            "{{instance}}",
                        ),
                        (
                            _rate("penstock_worker_engine_cpu_seconds_total", "instance"),
                            "engine {{instance}}",
                        ),
                    ],
                ),
                Panel(
                    "Memory",
                    "bytes",
                    "",
                    [
                        ('process_resident_memory_bytes{job="penstock"}', "{{instance}}"),
                        ("penstock_worker_engine_resident_memory_bytes", "engine {{instance}}"),
                    ],
                ),
                Panel(
                    "Certificates end in",
                    "s",
                    "",
                    [
                        (
                            "min by (use) (penstock_certificate_expiry_timestamp_seconds) - time()",
                            "{{use}}",
                        )
                    ],
                ),
            ],
        ),
    ],
)

REQUEST_PATH = Page(
    "request-path",
    "request path by stage",
    "Where a request's time goes, stage by stage as in its trace.",
    variables=[("service", "label_values(penstock_stage_seconds_count, service)")],
    rows=[
        (
            "All stages",
            [
                Panel(
                    "p95 by stage",
                    "s",
                    "Stages within each other: `request` holds all, `run` what the worker does.",
                    [(_quantile(0.95, "penstock_stage_seconds", "service, stage", '{service=~"$service"}'), "{{service}} {{stage}}")],
                ),
                Panel(
                    "Mean by stage",
                    "s",
                    "",
                    [
                        (
                            f'sum by (service, stage) (rate(penstock_stage_seconds_sum{{service=~"$service"}}{_RATE}))'
                            f' / sum by (service, stage) (rate(penstock_stage_seconds_count{{service=~"$service"}}{_RATE}))',
                            "{{service}} {{stage}}",
                        )
                    ],
                ),
            ],
        ),
        (
            "Gateway",
            [
                Panel("Requests by status", "reqps", "", [(_rate("penstock_gateway_requests_total", "status"), "{{status}}")]),
                Panel("Duration p95 by route", "s", "", [(_quantile(0.95, "penstock_gateway_request_duration_seconds", "route"), "{{route}}")]),
                Panel("Under way", "short", "", [("sum by (instance) (penstock_gateway_running_requests)", "{{instance}}")]),
                Panel("Runs", "reqps", "Answers that outlive their clients, and what was made of them.", [(_rate("penstock_gateway_runs_total", "what"), "{{what}}")]),
                Panel(
                    "Turned away",
                    "reqps",
                    "Before the body was read; and unknown keys.",
                    [
                        (_rate("penstock_gateway_refused_total", "why"), "{{why}}"),
                        (_rate("penstock_gateway_auth_failures_total", "why"), "key or token: {{why}}"),
                        (_rate("penstock_gateway_issuer_looks_total", "outcome"), "looks for the issuer's keys: {{outcome}}"),
                    ],
                ),
            ],
        ),
        (
            "Jobs",
            [
                Panel("Jobs", "short", "Lines of batches, their batches, files to be indexed: of all gateways.", [("max by (kind, state) (penstock_gateway_jobs)", "{{kind}} {{state}}")]),
                Panel(
                    "What became of them",
                    "ops",
                    "",
                    [
                        (_rate("penstock_gateway_jobs_ended_total", "kind, outcome"), "{{kind}} {{outcome}}"),
                        (_rate("penstock_gateway_batches_total", "state"), "batches {{state}}"),
                    ],
                ),
                Panel("Lines under way at most", "short", "Grows while there is capacity that nobody else uses.", [("penstock_gateway_jobs_window", "{{instance}}")]),
                Panel("Dead jobs", "short", "Nobody will try them again: penstock jobs.", [("max(penstock_gateway_jobs_dead)", "dead")]),
            ],
        ),
        (
            "Retrieval",
            [
                Panel("Calls", "reqps", "", [(_rate("penstock_retrieval_requests_total", "method, code"), "{{method}} {{code}}")]),
                Panel("Duration p95", "s", "", [(_quantile(0.95, "penstock_retrieval_request_seconds", "method"), "{{method}}")]),
                Panel("Embedding", "short", "Texts in a forward pass, and waiting.", [
                    (_quantile(0.5, "penstock_retrieval_embed_batch_texts", "instance"), "in a pass {{instance}}"),
                    ("sum by (instance) (penstock_retrieval_embed_waiting_texts)", "waiting {{instance}}"),
                ]),
                Panel("Skipped", "reqps", "Chats answered without the passages asked for.", [(_rate("penstock_gateway_retrieval_skipped_total", "why"), "{{why}}")]),
                Panel("Searches told again", "reqps", "By what the cache said.", [(_rate("penstock_retrieval_cache_looks_total", "outcome"), "{{outcome}}")]),
                Panel("Time saved by the cache", "s", "A second.", [(_total("penstock_retrieval_cache_saved_seconds_total"), "saved")]),
                Panel("The cache's size", "bytes", "", [("sum by (instance) (penstock_retrieval_cache_bytes)", "{{instance}}"), ("sum by (instance) (penstock_retrieval_cache_entries)", "searches {{instance}}")]),
                Panel("Questions rewritten", "reqps", "By the rule, or a model.", [(_rate("penstock_gateway_rewritten_total", "by"), "{{by}}")]),
                Panel("Passages ranked anew", "reqps", "By a model, where one is named for it.", [(_rate("penstock_gateway_reranked_total", "outcome"), "{{outcome}}")]),
                Panel("Files indexed anew", "ops", "After another embedding model.", [(_rate("penstock_gateway_reindexed_files_total", "outcome"), "{{outcome}}")]),
                Panel("Citations", "reqps", "Of answers with passages: marks of passages that there are, and of none.", [(_rate("penstock_gateway_citations_total", "of"), "{{of}}")]),
                Panel("Quotations", "reqps", "Of such answers, looked up in their passages.", [(_rate("penstock_gateway_quotations_total", "outcome"), "{{outcome}}")]),
            ],
        ),
        (
            "Tokenizer",
            [
                Panel("Requests by outcome", "reqps", "", [(_rate("penstock_tokenizer_requests_total", "outcome"), "{{outcome}}")]),
                Panel("Cut from prompts", "short", "Passages and messages that did not fit the window.", [(_rate("penstock_tokenizer_cut_total", "what"), "{{what}}")]),
                Panel("Matches of the policy's rules", "reqps", "", [(_rate("penstock_policy_verdicts_total", "rule, action"), "{{rule}}: {{action}}")]),
                Panel("Policy in use", "short", "Replicas by its version; below: those whose file is bad, so that the last good one goes on.", [
                    ("count by (version) (penstock_policy_info)", "{{version}}"),
                    ("count(penstock_policy_file_good == 0)", "bad file"),
                ]),
                Panel("Lost below", "reqps", "Routers lost under a request, and tokenizers.", [
                    (_rate("penstock_tokenizer_router_losses_total", "why"), "router {{why}}"),
                    (_rate("penstock_gateway_tokenizer_losses_total", "why"), "tokenizer {{why}}"),
                ]),
            ],
        ),
        (
            "Prefill and decode",
            [
                Panel("Prefill p95", "s", "From a request's first place in a step to its first token.", [(_quantile(0.95, "penstock_worker_prefill_seconds", "model, role"), "{{model}} {{role}}")]),
                Panel("Token p95", "s", "Mean time between a request's tokens.", [(_quantile(0.95, "penstock_worker_decode_token_seconds", "model, role"), "{{model}} {{role}}")]),
                Panel("KV handed over", "binBps", "", [(_rate("penstock_worker_kv_sent_bytes_total", "transport"), "{{transport}}")]),
            ],
        ),
    ],
)  # fmt: skip

WORKERS = Page(
    "workers",
    "workers and KV",
    "What the engines do, and what they have room for.",
    variables=[("model", "label_values(penstock_worker_steps_total, model)")],
    rows=[
        (
            "KV",
            [
                Panel("Blocks in use", "percentunit", "By running sequences; cached prefixes make room at once.", [(f"penstock:kv_use:ratio{_OF_MODEL}", "{{instance}}")]),
                Panel("Sequences", "short", "", [
                    (f"penstock_worker_running_sequences{_OF_MODEL}", "running {{instance}}"),
                    (f"penstock_worker_waiting_sequences{_OF_MODEL}", "waiting {{instance}}"),
                ]),
                Panel("Preemptions", "short", "Sequences a second whose blocks were taken.", [(_rate("penstock_worker_preemptions_total", "instance", _OF_MODEL), "{{instance}}")]),
                Panel("Blocks made for decode workers", "short", "", [(_rate("penstock_worker_kv_blocks_exported_total", "instance", _OF_MODEL), "{{instance}}")]),
            ],
        ),
        (
            "KV on disk",
            [
                Panel("Blocks", "short", "A second. Missed: were to be there; passed: computing was expected to be sooner; dropped: the disk was too slow.", [(_rate("penstock_worker_kv_tier_blocks_total", "event", _OF_MODEL), "{{event}}")]),
                Panel("Bytes", "binBps", "", [(_rate("penstock_worker_kv_tier_bytes_total", "instance, event", _OF_MODEL), "{{event}} {{instance}}")]),
                Panel("Held", "bytes", "Of all workers of a host: each tells the same.", [(f"penstock_worker_kv_tier_held_bytes{_OF_MODEL}", "{{instance}}")]),
            ],
        ),
        (
            "Steps",
            [
                Panel("Steps", "short", "A second. Zero with requests pending is dead.", [
                    (_rate("penstock_worker_steps_total", "instance", _OF_MODEL), "steps {{instance}}"),
                    (f"penstock_worker_pending_requests{_OF_MODEL}", "pending {{instance}}"),
                ]),
                Panel("Duration", "s", "", [
                    (_quantile(0.5, "penstock_worker_step_seconds", "instance", _OF_MODEL), "p50 {{instance}}"),
                    (_quantile(0.99, "penstock_worker_step_seconds", "instance", _OF_MODEL), "p99 {{instance}}"),
                ]),
                Panel("Tokens", "short", "A second.", [
                    (_rate("penstock_worker_prefill_tokens_total", "instance", _OF_MODEL), "prefill {{instance}}"),
                    (_rate("penstock_worker_decode_tokens_total", "instance", _OF_MODEL), "decode {{instance}}"),
                ]),
                Panel("Guessed ahead", "short", "Tokens a second. What was computed and is not right was for nothing.", [
                    (_rate("penstock_worker_draft_tokens_total", "instance", _OF_MODEL), "computed {{instance}}"),
                    (_rate("penstock_worker_accepted_tokens_total", "instance", _OF_MODEL), "right {{instance}}"),
                ]),
            ],
        ),
        (
            "GPUs",
            [
                Panel("Utilization", "percentunit", "Share of time in which some kernel ran.", [("penstock_gpu_utilization_ratio", "{{instance}} {{gpu}}")]),
                Panel("Memory", "percentunit", "Level: 90 %.", [("penstock:gpu_memory_use:ratio", "{{instance}} {{gpu}}")]),
                Panel("Temperature", "celsius", "", [("penstock_gpu_temperature_celsius", "{{instance}} {{gpu}}")]),
                Panel("Power", "watt", "", [("penstock_gpu_power_watts", "{{instance}} {{gpu}}")]),
            ],
        ),
    ],
)  # fmt: skip

ROUTER = Page(
    "router",
    "router decisions",
    "Who is admitted, where requests go, and why they went elsewhere.",
    rows=[
        (
            "Admission",
            [
                Panel("At the routers", "short", "", [
                    ("sum(penstock_router_queued_requests)", "waiting"),
                    ("sum(penstock_router_admitted_requests)", "admitted"),
                ]),
                Panel("Wait", "s", "", [
                    (_quantile(q, "penstock_router_admission_wait_seconds", "job"), name)
                    for q, name in ((0.5, "p50"), (0.95, "p95"), (0.99, "p99"))
                ]),
                Panel("Granted by lane", "reqps", "`before`: an order made without Redis.", [(_rate("penstock_router_grants_total", "lane, order"), "{{lane}} {{order}}")]),
                Panel("Refused and recalled", "reqps", "", [
                    (_rate("penstock_router_refusals_total", "reason"), "{{reason}}"),
                    (_total("penstock_router_recalls_total"), "slots taken back"),
                ]),
            ],
        ),
        (
            "Placement",
            [
                Panel("Placed", "reqps", "", [(_rate("penstock_router_placements_total", "mode"), "{{mode}}")]),
                Panel("Prefix cache's hits", "percentunit", "Of the prompts' tokens, where they were placed.", [(f'{_total("penstock_router_prefix_hit_tokens_total")} / {_total("penstock_router_prompt_tokens_total")}', "hits")]),
                Panel("Next turns computed ahead", "reqps", "Known parts of prompts, by what became of them; then the turns that came.", [
                    (_rate("penstock_router_warmed_prompts_total", "outcome"), "{{outcome}}"),
                    (_rate("penstock_tokenizer_unwarmed_prompts_total", "why"), "not sent: {{why}}"),
                    (_rate("penstock_tokenizer_warmed_turns_total", "outcome"), "turn: {{outcome}}"),
                ]),
                Panel("Tokens computed ahead", "short", "A second, and how many of them next turns found. Decision 0059.", [
                    (_total("penstock_router_warmed_tokens_total"), "computed"),
                    (_total("penstock_tokenizer_warmed_hit_tokens_total"), "found"),
                ]),
                Panel("Time saved by that", "s", "A second.", [(_total("penstock_tokenizer_warmed_saved_seconds_total"), "saved")]),
                Panel("Ready workers", "short", "As the router sees them that sees most.", [("max by (model, role) (sum by (instance, model, role) (penstock_router_ready_workers))", "{{model}} {{role}}")]),
                Panel("Tokens", "short", "A second, to clients.", [(_total("penstock_router_output_tokens_total"), "output")]),
            ],
        ),
        (
            "Losses",
            [
                Panel("Failovers by cause", "short", "A second.", [(_rate("penstock_router_failovers_total", "cause"), "{{cause}}")]),
                Panel("Breakers open", "short", "", [("penstock_router_breakers_open", "{{instance}}")]),
                Panel("Quarantine", "short", "Requests a second that end engines, or are like those.", [(_rate("penstock_router_quarantined_requests_total", "how"), "{{how}}")]),
                Panel("Ends", "reqps", "", [(_rate("penstock_router_requests_total", "outcome"), "{{outcome}}")]),
            ],
        ),
        (
            "Latency at the router",
            [
                Panel("First token", "s", "From arrival at the router.", [(_quantile(0.95, "penstock_router_time_to_first_token_seconds", "instance"), "p95 {{instance}}")]),
                Panel("Between tokens", "s", "", [(_quantile(0.95, "penstock_router_inter_token_latency_seconds", "instance"), "p95 {{instance}}")]),
            ],
        ),
    ],
)  # fmt: skip

TENANTS = Page(
    "tenants",
    "tenants and cost",
    "Who uses how much, what that costs (PENSTOCK_METERING__PRICES), and whom limits stop.",
    rows=[
        (
            "Tokens",
            [
                Panel("Tokens by tenant", "short", "A second, over an hour. `other`: tenants past PENSTOCK_GATEWAY__TENANTS_IN_METRICS.", [("topk(20, penstock:tenant_tokens:rate1h)", "{{tenant}}")]),
                Panel("By kind", "short", "A second.", [(_rate("penstock_gateway_tenant_tokens_total", "kind"), "{{kind}}")]),
                Panel("Against the day before", "short", "3 is a cost spike.", [("penstock:tenant_tokens:rate1h / avg_over_time(penstock:tenant_tokens:rate1h[1d] offset 1h)", "{{tenant}}")]),
            ],
        ),
        (
            "Cost",
            [
                Panel("An hour, at this hour's pace", "short", "In the currency of the price table.", [("topk(20, penstock:tenant_cost:rate1h * 3600)", "{{tenant}}")]),
                Panel("The last day", "short", "", [("topk(20, sum by (tenant) (increase(penstock_gateway_tenant_cost_total[1d])))", "{{tenant}}")], now=True),
                Panel("By model", "short", "An hour, at this hour's pace.", [("sum by (model) (rate(penstock_gateway_cost_total[1h])) * 3600", "{{model}}")]),
            ],
        ),
        (
            "Limits and the ledger",
            [
                Panel("Stopped by limits", "short", "A second, by what the limit counts.", [(_rate("penstock_gateway_limited_total", "of"), "{{of}}")]),
                Panel("Came while Redis was away", "short", "A second, by what their limits say of that.", [(_rate("penstock_gateway_limits_unchecked_total", "outcome"), "{{outcome}}")]),
                Panel("Not in the ledger yet", "short", "Ended requests that wait for Redis.", [("sum(penstock_gateway_unsettled_requests)", "wait")]),
                Panel("Missing for good", "short", "In an hour: lost with a gateway while Redis was away, or cut off a full ledger.", [("sum(increase(penstock_gateway_unledgered_total[1h]))", "lost"), ("sum(increase(penstock_gateway_ledger_cut_total[1h]))", "cut")]),
                Panel("Cost that the ledger lacks", "short", "Of what was lost, in an hour.", [("sum(increase(penstock_gateway_unledgered_cost_total[1h]))", "cost")]),
                Panel("Gateways lost under requests", "short", "Requests settled by another gateway, in an hour.", [("sum(increase(penstock_gateway_lapsed_total[1h]))", "requests")]),
            ],
        ),
    ],
)  # fmt: skip

AROUND = Page(
    "around",
    "Redis, Qdrant, Ray",
    "What Penstock stands on. The lower rows need Redis' exporter, Qdrant's /metrics and Ray's.",
    rows=[
        (
            "As Penstock sees them",
            [
                Panel("Redis reachable", "short", "0: some replica does not reach it.", [("min by (service) (penstock_redis_reachable)", "{{service}}")]),
                Panel("Redis' memory in use", "percentunit", "Of its maxmemory; from 80 % on tenants keep nothing more.", [("max(penstock_gateway_redis_memory_ratio)", "in use")]),
                Panel("Admission without Redis", "short", "1: this router decides alone.", [("penstock_router_admission_without_redis_state", "{{instance}}")]),
                Panel("Vector store p95", "s", "", [(_quantile(0.95, "penstock_retrieval_store_seconds", "operation"), "{{operation}}")]),
                Panel("Vector store's failures", "short", "A second.", [(_rate("penstock_retrieval_store_failures_total", "operation, reason"), "{{operation}} {{reason}}")]),
            ],
        ),
        (
            "Documents",
            [
                Panel("Uploads of all tenants", "bytes", "In the blob store.", [("max(penstock_gateway_blob_bytes)", "uploads"), ("max(penstock_gateway_blob_bytes_limit)", "limit")]),
                Panel("Files in Redis", "bytes", "Batches' answers, of all tenants.", [("max(penstock_gateway_file_bytes)", "files"), ("max(penstock_gateway_file_bytes_limit)", "limit")]),
                Panel("Orphans deleted", "short", "A second; uploads that nothing tells of.", [(_total("penstock_gateway_orphan_blobs_total"), "blobs"), (_total("penstock_gateway_orphan_looks_failed_total"), "failed looks")]),
                Panel("Uploads without room", "short", "A second; `all`: all tenants' files together have reached the limit.", [(_rate("penstock_gateway_files_refused_total", "limit"), "{{limit}}")]),
                Panel("Chunks stored", "short", "A second.", [(_total("penstock_retrieval_indexed_chunks_total"), "chunks")]),
                Panel("Reading or cutting a document p95", "s", "", [(_quantile(0.95, "penstock_retrieval_chunking_seconds", "job"), "p95")]),
                Panel("Processes ended by a document", "short", "A second.", [(_rate("penstock_retrieval_chunkers_lost_total", "cause"), "{{cause}}")]),
                Panel("Passages found", "short", "By a search, median.", [(_quantile(0.5, "penstock_retrieval_search_passages", "job"), "p50")]),
            ],
        ),
        (
            "Redis (redis_exporter)",
            [
                Panel("Commands", "ops", "", [("sum by (instance) (rate(redis_commands_processed_total[$__rate_interval]))", "{{instance}}")]),
                Panel("Memory", "bytes", "", [("redis_memory_used_bytes", "used {{instance}}"), ("redis_memory_max_bytes > 0", "limit {{instance}}")]),
                Panel("Clients", "short", "", [("redis_connected_clients", "{{instance}}")]),
                Panel("Changes not yet saved", "short", "", [("redis_rdb_changes_since_last_save", "{{instance}}")]),
            ],
        ),
        (
            "Qdrant",
            [
                Panel("Collections", "short", "", [("collections_total", "{{instance}}")]),
                Panel("REST calls", "reqps", "", [("sum by (endpoint, status) (rate(rest_responses_total[$__rate_interval]))", "{{endpoint}} {{status}}")]),
                Panel("gRPC calls", "reqps", "", [("sum by (endpoint) (rate(grpc_responses_total[$__rate_interval]))", "{{endpoint}}")]),
            ],
        ),
        (
            "Ray",
            [
                Panel("Serve's replicas", "short", "", [("sum by (deployment) (ray_serve_deployment_replica_healthy)", "{{deployment}}")]),
                Panel("Nodes", "short", "", [("ray_cluster_active_nodes", "{{node_type}}")]),
                Panel("Object store", "bytes", "Carries no tokens: it stays empty.", [("sum(ray_object_store_memory)", "used")]),
            ],
        ),
    ],
)  # fmt: skip

PAGES = (OVERVIEW, REQUEST_PATH, WORKERS, ROUTER, TENANTS, AROUND)
