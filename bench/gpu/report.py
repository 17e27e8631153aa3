"""Results as Markdown."""

from typing import Any


def markdown(result: dict[str, Any]) -> str:
    """Of what the JSON holds."""
    device, checks = result["device"], result["checks"]
    failed = [check for check in checks if not check["passed"]]
    lines = [
        f"# {device['name']}",
        "",
        f"torch {result['versions']['torch']}, triton {result['versions']['triton']}; a copy moves "
        f"{device['bytes_per_s'] / 1e12:.2f} TB/s, a large bfloat16 product does "
        f"{device['flops_per_s'] / 1e12:.0f} TFLOP/s. Floors are of these.",
        "",
        f"## Checks: {len(checks) - len(failed)} of {len(checks)} passed",
        "",
        *(f"- FAILED {check['name']}: {check['error']:.2e}" for check in failed),
        "",
    ]
    if result["agreement"]:
        equal, tokens = result["agreement"]["equal"], result["agreement"]["tokens"]
        lines += [f"Engine, greedy in float32: {equal} of {tokens} tokens as the reference's.", ""]
    for title in ("kernels", "engine"):
        lines += [f"## {title.capitalize()}", ""]
        lines += ["| | µs | floor, µs | of floor |", "| --- | --- | --- | --- |"]
        for line in result[title]:
            share = f"{line['of_floor']:.0%}"
            lines.append(
                f"| {line['name']} | {line['seconds'] * 1e6:.1f} | {line['floor_s'] * 1e6:.1f} "
                f"| {share} |"
            )
        lines.append("")
    if result["left_out"]:
        lines += ["Left out, for want of time or by an error:", ""]
        lines += [f"- {name}" for name in result["left_out"]]
    return "\n".join(lines) + "\n"
