"""The models that the settings name, and the policy: whether they could be read."""

from pathlib import Path

from services.cli.commands.doctor.findings import Finding, aside, failed, ok
from services.cli.commands.doctor.installation import Installation
from services.cli.commands.up import local_models
from services.cli.stack.checkpoints import check_embeddings, check_engines, check_local
from services.common.checkpoints.checkpoint import digest, is_hub_id, locate
from services.common.config import ModelSpec, Settings
from services.common.policy import read_policy


async def check(it: Installation) -> list[Finding]:
    models = it.settings.models or local_models([])  # as `penstock up` does
    return [
        *[await aside(_check, model, it.settings) for model in models],
        await aside(_embeddings, it.settings),
        await aside(_policy, it.settings),
    ]


def _check(model: ModelSpec, settings: Settings) -> Finding:
    about, folder = f"model {model.name}", Path(model.path).expanduser()
    if not folder.is_dir():
        if is_hub_id(model.path):
            return ok(about, f"{model.path} is downloaded from the hub at the start")
        if not folder.is_file():
            return failed(about, f"there is no folder {model.path}", "correct PENSTOCK_MODELS")
    try:
        folder = locate(model)  # of a GGUF file, made of its header
        check_local(model, folder, weights=True)
    except (RuntimeError, OSError, ValueError) as error:
        return failed(about, str(error), "put a whole checkpoint there that is supported")
    try:
        check_engines(model, folder, settings)
    except RuntimeError as error:
        return failed(about, str(error), "correct that setting")
    (quantization,) = {settings.of_worker(model, pool).worker.quantization for pool in model.pools}
    return ok(about, f"{folder} can be read, {digest(folder, quantization)}")


def _embeddings(settings: Settings) -> Finding:
    about, own = "embedding model", settings.retrieval
    try:
        check_embeddings(own)
    except RuntimeError as error:
        return failed(about, str(error), "correct that setting")
    names = own.embedding_model or "the one that is built in", *own.embedders
    return ok(about, ", ".join(names))


def _policy(settings: Settings) -> Finding:
    path = settings.policy.file
    if path is None:
        return ok("policy", "none is set")
    try:
        policy = read_policy(path)
    except ValueError as error:
        return failed("policy", str(error), "correct it, or PENSTOCK_POLICY__FILE")
    return ok("policy", f"{len(policy.rules.spec.rules)} rules, version {policy.version}")
