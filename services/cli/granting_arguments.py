"""What the commands take that say who may what. Imports next to nothing, as arguments.py."""

import argparse

from services.cli.arguments import whole

_CENTURY_S = 100 * 365 * 86_400
_PRIORITIES = ["high", "normal", "low"]
_DAY_S = 86_400


def keys(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="make a key and print it, once")
    whose = create.add_mutually_exclusive_group(required=True)
    whose.add_argument("--tenant", help="whose requests these are")
    whose.add_argument(
        "--admin", action="store_true", help="an administrator's, for the admin listener alone"
    )
    create.add_argument("--name", default="", help="a note of what the key is for")
    _key(create, "its tenant's")
    create.add_argument(
        "--expires",
        type=_lifetime,
        metavar="TIME",
        help="after how long no gateway takes it: 30m, 12h, 90d (default: never)",
    )
    _limits(create, "--limit", "of this key")
    actions.add_parser("list", help="all keys, without their texts")
    change = actions.add_parser("change", help="what a key may; what is not given stays")
    change.add_argument("id", help="as listed")
    change.add_argument("--name", help="a note of what the key is for")
    _key(change, "as it is")
    rotate = actions.add_parser("rotate", help="make a new key in place of one, and print it, once")
    rotate.add_argument("id", help="as listed; it stays the new key's")
    rotate.add_argument(
        "--overlap",
        type=_duration,
        default=_DAY_S,
        metavar="TIME",
        help="how long the old one holds, 0s: no more (default 1d)",
    )
    revoke = actions.add_parser("revoke", help="end a key, and what it was rotated from")
    revoke.add_argument("id", help="as listed")


def _key(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument("--priority", choices=_PRIORITIES, help=f"default: {default}")
    parser.add_argument(
        "--weight",
        type=float,
        help=f"the tenant's share when requests wait (default: {default})",
    )
    _models(parser, "a model the key may use")
    parser.add_argument(
        "--role",
        choices=["member", "read-only", "admin", "operator"],
        help="a tenant's: member (default) or read-only; an administrator's: admin, operator or "
        "read-only (default)",
    )
    parser.add_argument(
        "--scope",
        action="append",
        metavar="PERMISSION",
        help="of the role's permissions those alone, as inference or files:read, may be repeated "
        "(default: all)",
    )


def tokens(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="revocations that still end something")
    revoke = actions.add_parser("revoke", help="end a user's tokens, or one, before they expire")
    whose = revoke.add_mutually_exclusive_group(required=True)
    whose.add_argument("--tenant", help="whose requests they are for")
    whose.add_argument("--admin", action="store_true", help="they are for the admin listener")
    which = revoke.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--user",
        metavar="oidc:SUBJECT",
        help="as records and usage name him: all issued until now; new ones hold",
    )
    which.add_argument("--token", metavar="JTI", help="the one with this `jti`")


def tenants(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("list", help="all tenants, and what they are granted")
    for action, help in (("add", "a new tenant"), ("change", "what is not given stays")):
        one = actions.add_parser(action, help=help)
        one.add_argument("name")
        one.add_argument("--note", help="what for, or who")
        one.add_argument("--priority", choices=_PRIORITIES, help="of keys that have none")
        one.add_argument("--weight", type=float, help="share when requests wait, likewise")
        _models(one, "a model that its keys may use")
        if action == "add":
            _limits(one, "--limit", "of all of it together")
            _limits(one, "--each-limit", "of each of its keys and users")
    for action, help in (
        ("suspend", "let nobody of it in, until it is resumed"),
        ("resume", "let its keys and users in again"),
    ):
        actions.add_parser(action, help=help).add_argument("name")


def limits(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    of_whom = actions.add_parser("list", help="the limits of tenants and keys")
    which = of_whom.add_mutually_exclusive_group()
    which.add_argument("--tenant", help="of this one alone")
    which.add_argument("--key", metavar="ID", help="of this one alone")
    set_one = actions.add_parser("set", help="a new limit, or other figures for one")
    _whose_limit(set_one)
    set_one.add_argument(
        "--of", required=True, choices=["requests", "tokens", "concurrent", "cost"]
    )
    set_one.add_argument("--most", required=True, type=float, metavar="N", help="so much")
    set_one.add_argument(
        "--per",
        choices=["minute", "hour", "day", "month"],
        help="in so long; day and month are the calendar's (UTC)",
    )
    set_one.add_argument("--model", metavar="NAME", help="for this one (default: all together)")
    set_one.add_argument(
        "--without-redis",
        choices=["open", "closed"],
        default="open",
        help="while it cannot be counted: open (default) lets through, closed refuses",
    )
    _whose_limit(actions.add_parser("remove", help="take a limit away"))


def _limits(parser: argparse.ArgumentParser, option: str, whose: str) -> None:
    parser.add_argument(
        option,
        action="append",
        default=[],
        metavar="JSON",
        help=f"""a limit {whose}, may be repeated:
        '{{"name": "rpm", "of": "requests", "per": "minute", "most": 60}}'""",
    )


def _whose_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="what tells it from the others")
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--tenant", help="of all of the tenant together")
    whose.add_argument("--each-of", metavar="TENANT", help="of each of its keys and users")
    whose.add_argument("--key", metavar="ID", help="of this key")


def audit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--about", metavar="WHAT", help="key_..., tenant:NAME or model:NAME alone")
    parser.add_argument(
        "--last", type=whole(1), default=50, metavar="N", help="so many (default 50)"
    )
    parser.add_argument("--json", action="store_true", help="a JSON object a line, oldest first")


def jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--last", type=whole(1), default=50, metavar="N", help="so many dead ones (default 50)"
    )
    parser.add_argument(
        "--json", action="store_true", help="dead ones as JSON objects, a line each"
    )


def _models(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help=f"{what}, may be repeated; with the name * alone: all (default for a new one)",
    )


def _lifetime(text: str) -> int:
    return _duration(text, least=1)


def _duration(text: str, least: int = 0) -> int:
    """Seconds."""
    number, unit = text[:-1], {"s": 1, "m": 60, "h": 3600, "d": _DAY_S}.get(text[-1:])
    if unit is None or not number.isdecimal() or not least <= int(number) * unit <= _CENTURY_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 45s, 30m, 12h or 90d")
    return int(number) * unit
