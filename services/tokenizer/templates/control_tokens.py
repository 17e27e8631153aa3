"""Which of a tokenizer's tokens only its chat template may write, and which not everybody.

Only the template writes those that are marked special, and those that are not, although they make
turns: checkpoints come with `<|im_start|>` as a token that is added and no more. Taken for such are
the tokens that the tokenizer has a name for (eos, bos, …), those of the form `<|…|>`, which is no
text anybody writes, and those of the form `<…>` or `[…]` that stand in the template. Of these not a
tag that is there with its end (`<think>` and `</think>`, `<tool_call>` and `</tool_call>`): a model
writes it, and who hands on its former answers does. Words and white space are text, whoever added
them.
"""

import re
from collections.abc import Iterable
from typing import Any

_CONTROL = re.compile(r"<[|\uff5c]\S+>|<\S+[|\uff5c]>")  # of DeepSeek's, the bar is a wide one
_MARK = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")
_CITES = re.compile(r"\[[0-9]+\]")


def control_tokens(tokenizer: Any, source: str) -> list[str]:
    """The longest first. `tokenizer`: of transformers; `source`: its templates."""
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    named = {name for name in tokenizer.special_tokens_map.values() if isinstance(name, str)}

    def is_control(token: str) -> bool:
        if added[token] or token in named or _CONTROL.fullmatch(token):
            return True
        return bool(_MARK.fullmatch(token)) and token in source and _partner(token) not in added

    return sorted(filter(is_control, filter(None, added)), key=len, reverse=True)


def answer_tokens(added: Iterable[str], source: str) -> set[str]:
    """Of added tokens those by which answers are read: tags that stand in the templates, of calls
    and of reasoning, and numbers in brackets, of citations. Former answers hold them, and a user
    may; a passage or what a tool returns is by others, and makes none: what calls a tool there
    could be taken for what the model began.
    """
    return {
        token
        for token in added
        if _CITES.fullmatch(token)
        or (_MARK.fullmatch(token) and (token in source or _partner(token) in source))
    }


def _partner(mark: str) -> str:
    """What a tag ends with, or an end begins with."""
    return f"<{mark[2:]}" if mark.startswith("</") else f"</{mark[1:]}"
