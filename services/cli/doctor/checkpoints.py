"""The models that the settings name: whether an engine could read them."""

from pathlib import Path

from services.cli.checkpoints import check_local
from services.cli.doctor.findings import Finding, aside, failed, ok
from services.cli.doctor.installation import Installation
from services.cli.up import local_models
from services.common.checkpoint import digest, is_hub_id
from services.common.config import ModelSpec


async def check(it: Installation) -> list[Finding]:
    models = it.settings.models or local_models([])  # as `penstock up` does
    return [await aside(_check, model) for model in models]


def _check(model: ModelSpec) -> Finding:
    about, folder = f"model {model.name}", Path(model.path).expanduser()
    if not folder.is_dir():
        if is_hub_id(model.path):
            return ok(about, f"{model.path} is downloaded from the hub at the start")
        return failed(about, f"there is no folder {model.path}", "correct PENSTOCK_MODELS")
    try:
        check_local(model, folder, weights=True)
    except (RuntimeError, OSError, ValueError) as error:
        return failed(about, str(error), "put a whole checkpoint there that is supported")
    return ok(about, f"{folder} can be read, {digest(folder)}")
