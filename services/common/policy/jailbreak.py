"""Attempts to talk a model out of its instructions: signs of them, each with a weight.

No sign is a proof by itself, and a rule says how much they must weigh together. They are looked for
in English, in the folded text and in its other readings.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

from services.common.policy.pattern import compiled
from services.common.policy.rules import search
from services.common.policy.work import Work

_GAP = r"[^.!?\n]{0,40}?"


def _near(*kinds: str) -> str:
    """One word of each kind, in this order, with little between them."""
    return _GAP.join(rf"\b(?:{'|'.join(words.split())})\b" for words in kinds)


_SIGNS = (
    (
        1.0,
        _near(
            "ignore disregard forget override bypass skip",
            "previous prior above earlier preceding system initial original your all any",
            "instructions? prompts? rules? directions? guidelines? messages? policy training",
        ),
    ),
    (
        1.0,
        _near(
            r"reveal print show repeat output leak dump tell\sme what\sis what\sare",
            "your the",
            "system hidden initial secret original",
            "prompt instructions? message rules",
        ),
    ),
    (1.0, r"<\|(?:im_start|im_end|system|start_header_id|eot_id|endoftext)\|>"),
    (1.0, r"\[/?INST\]|<</?SYS>>"),
    (1.0, _near(r"do\sanything\snow jailbr(?:eak|oken) (?:dan|developer|god|unfiltered)\smode")),
    (0.6, _near(r"you\sare\s(?:now|no\slonger) from\snow\son,?\syou act\sas\s(?:if|though|an?)")),
    (0.6, _near(r"pretend\s(?:to\sbe|you\sare|that\syou)")),
    (
        0.6,
        _near(
            r"without no ignor\w+ free\sof free\sfrom",
            r"restrictions? limitations? filters? censorship guardrails? ethic\w* moral\w* safety",
        ),
    ),
    (
        0.5,
        _near(
            r"never you\s(?:must|will|can|are\sallowed\sto)",
            r"refuse decline apologi[sz]e say\sno break\scharacter",
        ),
    ),
    (0.5, r"\b(?:new|updated|real) (?:system )?(?:instructions?|prompt|rules)\s?:"),
    (0.4, r"(?m)^\s{0,4}(?:#{1,4} )?(?:system|developer|assistant)\s?:"),
    (0.3, _near(r"hypothetical(?:ly)? roleplay for\s(?:educational|research)\spurposes")),
)


@cache
def _signs() -> tuple[tuple[float, Any], ...]:
    return tuple((weight, compiled(pattern)) for weight, pattern in _SIGNS)


@cache
def _any() -> Any:
    return compiled("|".join(f"(?:{pattern})" for _, pattern in _SIGNS), 64 * 2**20)


def weight(readings: Iterable[bytes], work: Work) -> float:
    """Of all signs that some reading of a text has, each once. Raises TooMuchError."""
    seen: set[int] = set()
    for text in readings:
        if search(_any(), None, text, 0, work) is None:
            continue
        for number, (_, sign) in enumerate(_signs()):
            if number not in seen and search(sign, None, text, 0, work) is not None:
                seen.add(number)
    return round(sum(_SIGNS[number][0] for number in seen), 6)
