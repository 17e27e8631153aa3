import re

from services.metrics_doc import DOCUMENT, Family, all_families, document

BASE_UNITS = ("seconds", "bytes", "ratio", "celsius", "watts", "tokens_per_second", "info")
NO_BASE_UNITS = re.compile(r"_(ms|millis\w*|micros\w*|minutes|hours|percent|kb|kib|mb|mib|gb)\b")


def test_the_metrics_page_is_current() -> None:
    assert DOCUMENT.read_text() == document(), "run `make docs`"


def test_names_are_as_prometheus_wants_them() -> None:
    for name, family in all_families().items():
        assert re.fullmatch(r"penstock_[a-z_]+", name), name
        assert not NO_BASE_UNITS.search(name), name
        assert name.endswith("_total") == (family.kind == "counter"), name
        if family.kind == "histogram":
            assert name.endswith((*BASE_UNITS, "_texts", "_passages")), name
        assert family.told.strip(), f"{name} says nothing"
        assert "|" not in family.told


def test_labels_and_series_are_told() -> None:
    known = all_families()
    assert known["penstock_worker_steps_total"] == Family(
        "penstock_worker_steps_total", "counter", ("model", "role"), "Engine steps"
    )
    assert known["penstock_gpu_power_watts"].labels == ("gpu", "uuid", "name")
    assert known["penstock_stage_seconds"].series == {
        f"penstock_stage_seconds_{suffix}" for suffix in ("bucket", "sum", "count")
    }


def test_no_label_can_grow_without_bound() -> None:
    unbounded = {"request_id", "trace_id", "key", "user", "path", "worker", "address", "replica"}
    for family in all_families().values():
        assert not unbounded & set(family.labels), family.name
