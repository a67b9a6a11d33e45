"""What the YAML files' models share: the base class, the types of their values, and pydantic's errors in our words."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, TypeVar

from annotated_types import Ge, Gt, Le, MinLen
from pydantic import (
    AfterValidator,
    AllowInfNan,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Strict,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from matrix.errors import UsageError, nearest
from matrix.yamlfile import Document, shown

MAX_WORD = 100  # a cell's id ends up in file names, which hold 255 bytes
SHOWN_ERRORS = 5
MOST_SORTED = 100  # a hostile file can have as many errors as values


class Section(BaseModel):
    """Base of all models: immutable; a key that it does not know is an error with the nearest one that it does."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        if isinstance(data, dict) and cls.model_config.get("extra") == "forbid":
            known = [each.alias or name for name, each in cls.model_fields.items()]
            for key in data:
                if key not in known:
                    raise wrong(f"unknown key {shown(key)}: {nearest(key, known)}", part=key, type_="unknown_key")
        return data


def wrong(text: str, part: int | str | None = None, type_: str = "wrong") -> PydanticCustomError:
    """An error of a validator, in words; `part` is the index or key of what is wrong within the value."""
    return PydanticCustomError(type_, "{text}", {"text": text, "part": part})


def word(value: str) -> str:
    """A name as it may stand in a cell's id.

    Raises:
        PydanticCustomError: it is empty or long, or has a character that means something in ids and selections.
    """
    if not value:
        raise wrong("expected a name, got nothing")
    if len(value) > MAX_WORD:
        raise wrong(f"the name {shown(value)} is longer than {MAX_WORD} characters")
    bad = [each for each in value if each in "/\\=,| " or not each.isprintable()]
    if bad:
        raise wrong(f"a name cannot contain {bad[0]!r}, got {shown(value)}")
    if value in (".", "..") or value.startswith("-"):
        raise wrong(f"{shown(value)} cannot be a name")
    return value


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if not values:
        raise wrong("expected at least one value, got an empty list")
    seen: set[str] = set()
    for index, value in enumerate(values):
        if value in seen:
            raise wrong(f"{shown(value)} is there twice", part=index)
        seen.add(value)
    return values


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _day(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return datetime.date.fromisoformat(value)
        except ValueError:
            pass
    if isinstance(value, datetime.date):
        return value
    raise wrong(f"expected a date such as 2027-06-30, got {shown(value)}")


def _link(value: str) -> str:
    if not value.startswith(("https://", "http://")):  # it becomes a link on a page
        raise wrong(f"expected a link that begins with https://, got {shown(value)}")
    return value


_WRITTEN = {"type": ["string", "number", "boolean"]}
_WRITTEN_LIST = {"type": "array", "items": _WRITTEN, "minItems": 1, "uniqueItems": True}

# no `Field` in these: some versions of pydantic let one field's default leak into all others through a shared `Field`
Count = Annotated[int, Strict(), Ge(1), Le(10**9)]
Positive = Annotated[float, Strict(), Gt(0), AllowInfNan(False)]
Seconds = Annotated[Positive, Le(10**7)]
Text = Annotated[str, MinLen(1)]
Plain = Annotated[str, MinLen(1), WithJsonSchema(_WRITTEN)]
"""Text that is passed on; what YAML would take for a number or a boolean stays as written."""
Word = Annotated[str, AfterValidator(word), WithJsonSchema(_WRITTEN)]
Words = Annotated[tuple[Word, ...], AfterValidator(_distinct), WithJsonSchema(_WRITTEN_LIST)]
OneOrMore = Annotated[Words, BeforeValidator(_listed), WithJsonSchema({"anyOf": [_WRITTEN, _WRITTEN_LIST]})]
Match = Annotated[dict[Word, OneOrMore], MinLen(1)]
"""Axes or properties of a layout, and for each the values that match."""
Day = Annotated[datetime.date, BeforeValidator(_day)]
Link = Annotated[str, AfterValidator(_link)]

M = TypeVar("M", bound=BaseModel)


def validate(document: Document, model: type[M]) -> M:
    """The document as a `model`.

    Raises:
        UsageError: it is none; the message has a line, with its place, for each of the first few mistakes.
    """
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        details = error.errors(include_url=False)
    found = [_in_words(document, each) for each in details[:MOST_SORTED]]
    found.sort(key=lambda each: (each.line or 0, each.column or 0))
    first, rest = found[0], [str(each) for each in found[1:SHOWN_ERRORS]]
    if len(details) > SHOWN_ERRORS:
        rest.append(f"and {len(details) - SHOWN_ERRORS} more")
    raise UsageError("\n".join([first.message, *rest]), first.path, first.line, first.column)


_EXPECTED = {
    "bool_type": "true or false",
    "date_type": "a date such as 2027-06-30",
    "dict_type": "keys and values",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_attributes_type": "keys and values",
    "model_type": "keys and values",
    "string_too_short": "text",
    "string_type": "text",
    "too_short": "at least one value",
    "tuple_type": "a list",
}


def _in_words(document: Document, error: ErrorDetails) -> UsageError:
    location, kind, context = error["loc"], error["type"], error.get("ctx", {})
    key = kind == "unknown_key" or location[-1:] == ("[key]",)
    got = "nothing" if error["input"] == "" else shown(error["input"])
    if kind == "missing":
        return document.error(f"the key '{location[-1]}' is missing", location[:-1])
    if "text" in context:
        part = context["part"]
        below = location if part is None else (*location, part)
        return document.error(context["text"], below, key)
    if kind == "literal_error":
        valid = [each.strip("'") for each in context["expected"].replace(" or ", ", ").split(", ")]
        hint = nearest(str(error["input"]), valid)
        hint = f": {hint}" if hint.startswith("did") else ""
        return document.error(f"expected {context['expected']}, got {got}{hint}", location, key)
    if kind in _EXPECTED:
        return document.error(f"expected {_EXPECTED[kind]}, got {got}", location, key)
    if kind == "too_long":
        return document.error(f"expected at most {context['max_length']} entries, got more", location)
    bounds = {"greater_than": ("gt", "more than"), "greater_than_equal": ("ge", "at least")}
    bounds |= {"less_than_equal": ("le", "at most"), "less_than": ("lt", "less than")}
    if kind in bounds:
        bound, phrase = bounds[kind]
        limit = int(context[bound])
        positive = (kind, limit) in (("greater_than", 0), ("greater_than_equal", 1))
        expected = "a positive number" if positive else f"a number of {phrase} {limit}"
        return document.error(f"expected {expected}, got {got}", location)
    return document.error(f"{error['msg']}, got {got}", location)
