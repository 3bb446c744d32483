"""Fills config dataclasses from flags, environment, a config file and defaults, in that order.

A field's name is its flag, `TIDEMILL_<FIELD>` its variable, the string under it its help text.
It does not know what any field means.
"""

import argparse
import ast
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from difflib import get_close_matches
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import yaml

_OFF = "--no-"
_SWITCH = MappingProxyType({"true": True, "false": False, "1": True, "0": False})


class Secret(str):
    """Text that is neither shown nor put on a command line, where other users would see it."""


_LISTED = "listed"
Listed = Annotated[str, _LISTED]
"""Values with commas between; a file may have them as a list."""


class Setting(NamedTuple):
    """One field: its default (MISSING: required), its type, the string under it ('' if none), and
    whether it is a `Listed`."""

    default: Any
    hint: Any
    doc: str
    is_listed: bool = False


def settings_of(kind: type) -> dict[str, Setting]:
    """The fields of a dataclass by name, in their order."""
    (source,) = ast.parse(inspect.getsource(kind)).body
    docs = {
        ast.unparse(field.target): ast.literal_eval(below.value)
        for field, below in pairwise(source.body)  # type: ignore[attr-defined]
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr)
    }
    hints, marked = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    return {
        (n := f.name): Setting(_default(f), hints[n], docs.get(n, ""), _is_listed(marked[n]))
        for f in fields(kind)
    }


def _is_listed(hint: Any) -> bool:
    return any(_LISTED in getattr(one, "__metadata__", ()) for one in (hint, *get_args(hint)))


def flag_of(name: str, value: object = MISSING) -> str:
    """The flag of a field; with a value, an empty text too, the whole argument that sets it."""
    if isinstance(value, bool):
        return flag_of(name if value else f"no_{name}")
    flag = "--" + name.replace("_", "-")
    if value is MISSING:
        return flag
    return f"{flag}={value if isinstance(value, str) else json.dumps(value)}"


def parse(
    kinds: Sequence[type],
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    positional: str = "",
    hidden: Collection[str] = (),
    advice: Mapping[str, str] = MappingProxyType({}),
    spellings: Mapping[str, str] = MappingProxyType({}),
    environ: Mapping[str, str] = os.environ,
    check: Callable[..., object] | None = None,
) -> list[Any]:
    """One instance per dataclass. A field that several share is one flag and sets them all.

    `positional` names fields, in order, that may stand without their flags; `hidden` ones keep
    their defaults; `advice` says what to do about flags that are none of ours; `spellings` are
    other words for flags, here and as keys of a file. Ends with status 2
    at a wrong or unknown key, with 0 after --help and --print-config. Raises what `check` does of
    the instances, which it gets before any of them is shown.
    """
    own = [{n: s for n, s in settings_of(k).items() if n not in hidden} for k in kinds]
    known = {n: s for settings in (*own, *reversed(own)) for n, s in settings.items()}
    parser = _parser(known, prog, positional)
    given = sys.argv[1:] if argv is None else argv
    said, rest = parser.parse_known_args([_respelt(word, spellings) for word in given])
    try:
        unknown = _unplaced(said, rest, given, positional)
        _refuse_unknown("argument", unknown, map(flag_of, known), advice)
        path = said.config or environ.get("TIDEMILL_CONFIG", "")
        words = _words_of_file(path, known, advice, spellings) if path else []
        words += _words_of_environment(environ, known)
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(str(error))
    found = vars(parser.parse_args(words)) | vars(said)
    values = {n: found.get(n, setting.default) for n, setting in known.items()}
    if missing := [flag_of(n) for n, value in values.items() if value is MISSING]:
        parser.error(f"missing {', '.join(missing)}")
    made = [k(**{n: values[n] for n in names}) for k, names in zip(kinds, own, strict=True)]
    if check is not None:
        check(*made)
    if said.print_config:
        shown = {n: "(hidden)" if isinstance(v, Secret) else v for n, v in values.items()}
        print(json.dumps(shown, indent=2))
        parser.exit()
    return made


def _unplaced(said: Any, rest: list[str], given: Sequence[str], positional: str) -> list[str]:
    """Gives the bare words to fields of `positional` without a value; returns what is nobody's."""
    unsaid = [name for name in positional.split() if not hasattr(said, name)]
    if len(rest) <= len(unsaid) and all(word[:1] != "-" for word in rest):
        vars(said).update(zip(unsaid, rest, strict=False))
        return []
    if positional and not unsaid and given[0][:1] != "-":
        twice = flag_of(first := positional.split()[0], getattr(said, first))
        raise ValueError(f"{first} is given twice, {given[0]} and {twice}; leave one out")
    # Of several values of one flag, all but the first look like further positional ones.
    return [word for word in rest if word[:1] == "-"] or rest[len(unsaid) :]


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _parser(known: Mapping[str, Setting], prog: str, positional: str) -> argparse.ArgumentParser:
    bare = "".join(f"[{name.upper()}] " for name in positional.split())
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} {bare}[--flag VALUE ...]",
        epilog="Every flag is also a variable, TIDEMILL_<FLAG>, and a key of the --config file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", default="", metavar="FILE", help="YAML or JSON file of flags.")
    parser.add_argument(
        "--print-config", default=False, action="store_true", help="Show and leave."
    )
    for name, (default, hint, doc, _) in known.items():
        text = doc if default in (None, MISSING) else f"{doc} [{json.dumps(default)}]"
        how: dict[str, Any] = {"type": partial(_convert, hint), "metavar": _metavar(hint)}
        if hint is bool:
            how = {"action": argparse.BooleanOptionalAction}
        parser.add_argument(flag_of(name), help=text.replace("%", "%%"), **how)
    return parser


def _metavar(hint: Any) -> str:
    kinds = get_args(hint)
    if get_origin(hint) is Literal or hint is bool:
        return "{" + ",".join(kinds or _SWITCH) + "}"
    if NoneType in kinds:
        return _metavar(kinds[0])
    return "JSON" if get_origin(hint) is dict else str(hint.__name__).upper()


def _kind(hint: Any) -> str:
    return "a JSON object" if get_origin(hint) is dict else _metavar(hint)


def _convert(hint: Any, text: str) -> Any:
    kinds = get_args(hint)
    if NoneType in kinds:
        return None if text in ("none", "null") else _convert(kinds[0], text)
    try:
        if get_origin(hint) is Literal:
            return kinds[kinds.index(text)]
        if get_origin(hint) is dict:
            if not isinstance(found := json.loads(text), dict):
                raise ValueError("an array of pairs would be made one")
            return found
        return _SWITCH[text.lower()] if hint is bool else hint(text)
    except (KeyError, TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is not {_kind(hint)}") from None


def _respelt(word: str, spellings: Mapping[str, str]) -> str:
    """The same argument with our flag in the place of another word for it."""
    flag, equals, value = word.partition("=")
    return spellings.get(flag, flag) + equals + value


class _Once(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, of which YAML takes the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key.value for key, _ in node.value]
        if twice := [key for at, key in enumerate(keys) if key in keys[:at]]:
            raise ValueError(f"{self.name}: {twice[0]} is there twice; leave one of them out")
        return node


def _words_of_file(
    path: str,
    known: Mapping[str, Setting],
    advice: Mapping[str, str],
    spellings: Mapping[str, str],
) -> list[str]:
    with Path(path).open() as file:
        loaded = yaml.load(file, _Once)
    if not isinstance(loaded, dict):
        raise ValueError(f"{path}: expected a mapping of names to values")
    said: dict[str, tuple[str, Any]] = {}
    for key, value in ((str(key), value) for key, value in loaded.items()):
        name, meant = _setting_of_key(key, value, known, spellings)
        first, _ = said.setdefault(name, (key, meant))
        if first != key:
            raise ValueError(f"{path}: {first} and {key} are the same; leave one of them out")
    _refuse_unknown(f"key in {path}:", said, known, advice)
    return [
        flag_of(name, _convert_from(f"{path}: {key}", known[name], value))
        for name, (key, value) in said.items()
    ]


def _setting_of_key(
    key: str, value: Any, known: Mapping[str, Setting], spellings: Mapping[str, str]
) -> tuple[str, Any]:
    """(our name, value) of what a file says. What other servers switch off may be what ours has
    on, and their lists are ours with commas between. Raises ValueError for what is neither true
    nor false, and for lists of what is none; names that nobody knows are left to others."""
    flag = spellings.get(flag_of(key), flag_of(key))
    is_off = flag != flag_of(key) and flag.startswith(_OFF)
    name = flag.removeprefix(_OFF if is_off else "--").replace("-", "_")
    setting = known.get(name)
    if setting is None:
        return name, value
    if setting.hint is bool and not isinstance(value, bool):
        raise ValueError(f"{key} is {value!r}; it is true or false")
    if value is None and type(None) not in get_args(setting.hint):
        raise ValueError(f"{key} has no value; leave it out, or say which")
    if isinstance(value, list):
        value = _joined(key, value, setting)
    return name, not value if is_off else value


def _joined(key: str, listed: list[Any], setting: Setting) -> str:
    """The values may be secrets: errors do not show them."""
    if not setting.is_listed:
        raise ValueError(
            f"{key} is a list and takes one value; write {key}: {_metavar(setting.hint)}"
        )
    if not listed or not all(isinstance(one, str | int | float) for one in listed):
        raise ValueError(f"{key} must be a list of one text or more, or be left out")
    return ",".join(map(str, listed))


def _words_of_environment(environ: Mapping[str, str], known: Mapping[str, Setting]) -> list[str]:
    return [
        flag_of(name, _convert_from(variable, setting, text))
        for name, setting in known.items()
        if (text := environ.get(variable := f"TIDEMILL_{name.upper()}"))
    ]


def _convert_from(where: str, setting: Setting, value: object) -> Any:
    """Raises ValueError, naming `where` it was said."""
    try:
        return _convert(setting.hint, value if isinstance(value, str) else json.dumps(value))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{where}: {error}") from None


def _refuse_unknown(
    what: str, words: Iterable[str], known: Iterable[str], advice: Mapping[str, str]
) -> None:
    valid = list(known)
    for word in words:
        if word not in valid:
            name = word.partition("=")[0]
            told = advice.get(name) or advice.get(flag_of(name))
            near = get_close_matches(name, valid, n=2)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            if what == "argument" and word[:1] != "-":
                hint = "; several values of one flag stand with commas between"
            raise ValueError(f"unknown {what} {word}{f': {told}' if told else hint}")
