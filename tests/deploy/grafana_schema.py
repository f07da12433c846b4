"""grafana_schema.py DASHBOARD.json...: whether each dashboard has the fields and types that Grafana's own
schema names, as the package grafana_foundation_sdk carries it (classes generated from that schema).

Its readers drop keys they do not know and check no types. So: what a reader keeps is written again and compared,
and what it made is held against the classes' annotations. Prints what is wrong; the exit code is 1 then.
"""

import enum
import json
import sys
import types
import typing

from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard


def dropped(given, kept, path):
    """Keys and values that did not come through. null is the same as no key."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key in kept:
                yield from dropped(value, kept[key], f"{path}.{key}")
            elif value is not None:
                yield f"{path}.{key}: no such field in the schema"
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (one, other) in enumerate(zip(given, kept)):
            yield from dropped(one, other, f"{path}[{index}]")
    elif given != kept:
        yield f"{path}: {given!r} is read as {kept!r}"


def fits(value, hint):
    """Whether a value is of an annotated type; what the check cannot judge fits."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin in (list, dict):
        items = value.values() if origin is dict and isinstance(value, dict) else value
        return isinstance(value, origin) and all(fits(item, arguments[-1]) for item in items)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return value in [member.value for member in hint] or isinstance(value, hint)
    return isinstance(value, hint) if isinstance(hint, type) else True


def mistyped(value, path):
    """Fields of generated objects, at any depth, whose value is not of the annotated type."""
    if isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from mistyped(item, f"{path}[{index}]")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from mistyped(item, f"{path}.{key}")
    elif type(value).__module__.startswith("grafana_foundation_sdk.models") and not isinstance(value, enum.Enum):
        hints = typing.get_type_hints(type(value))
        for name, item in vars(value).items():
            if name in hints and not fits(item, hints[name]):
                yield f"{path}.{name}: {item!r} is no {hints[name]}"
            yield from mistyped(item, f"{path}.{name}")


def main(files):
    plugins.register_default_plugins()
    wrong = 0
    for file in files:
        with open(file, encoding="utf-8") as source:
            given = json.load(source)
        read = dashboard.Dashboard.from_json(given)
        kept = json.loads(JSONEncoder().encode(read))
        for problem in [*dropped(given, kept, ""), *mistyped(read, "")]:
            print(f"{file}: {problem}")
            wrong += 1
    return 1 if wrong or not files else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
