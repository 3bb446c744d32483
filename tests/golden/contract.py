"""A contract as it was once written down: messages made from stored descriptors, nothing generated.

`release.binpb` is the image that `buf build` makes of proto/; `frames.jsonl` are messages that
services of that release sent each other. Both are written by `python -m tests.golden.record` when a
release is made, and by nobody in between.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

FOLDER = Path(__file__).parents[1] / "fixtures" / "golden"
IMAGE, FRAMES = FOLDER / "release.binpb", FOLDER / "frames.jsonl"
OURS = "tidemill.v1."
EXTRA, EXTRA_NUMBER = "of_tomorrow", 18_999


class Method(NamedTuple):
    """What an RPC takes and answers."""

    asks: Any
    answers: Any


class Contract:
    """Message classes and RPCs of a set of descriptors, in a pool of their own."""

    def __init__(self, files: descriptor_pb2.FileDescriptorSet) -> None:
        pool = descriptor_pool.DescriptorPool()
        for file in files.file:
            pool.Add(file)
        self.kinds: dict[str, Any] = {}
        self.methods: dict[str, Method] = {}
        for file in files.file:
            found = pool.FindFileByName(file.name)
            for kind in _all(found.message_types_by_name.values()):
                self.kinds[kind.full_name] = message_factory.GetMessageClass(kind)
        for file in files.file:
            for service in pool.FindFileByName(file.name).services_by_name.values():
                for one in service.methods:
                    asks, answers = one.input_type.full_name, one.output_type.full_name
                    method = Method(self.kinds[asks], self.kinds[answers])
                    self.methods[f"/{service.full_name}/{one.name}"] = method


def _all(kinds: Any) -> Iterator[Any]:
    for kind in kinds:
        yield kind
        yield from _all(kind.nested_types)


def stored() -> descriptor_pb2.FileDescriptorSet:
    """The descriptors of the last release. An image of buf is such a set with more in it."""
    return descriptor_pb2.FileDescriptorSet.FromString(IMAGE.read_bytes())


def of_tomorrow(files: descriptor_pb2.FileDescriptorSet) -> descriptor_pb2.FileDescriptorSet:
    """The same with one more field in every message of ours."""
    newer = descriptor_pb2.FileDescriptorSet()
    newer.CopyFrom(files)
    for file in newer.file:
        if OURS.startswith(file.package + "."):
            for kind in file.message_type:
                kind.field.add(
                    name=EXTRA,
                    number=EXTRA_NUMBER,
                    type=descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
                    label=descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
                )
    return newer


def moved(
    files: descriptor_pb2.FileDescriptorSet, kind: str, field: str
) -> descriptor_pb2.FileDescriptorSet:
    """The same with one field under another number, so that what was sent as it is unknown."""
    older = descriptor_pb2.FileDescriptorSet()
    older.CopyFrom(files)
    for file in older.file:
        for message in file.message_type:
            if f"{file.package}.{message.name}" == kind:
                (one,) = (one for one in message.field if one.name == field)
                one.number = EXTRA_NUMBER
    return older


def fill(message: Any) -> None:
    """Sets the field of tomorrow here and in all messages below."""
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for inner in value if field.is_repeated else [value]:
            fill(inner)
    if EXTRA in message.DESCRIPTOR.fields_by_name:
        setattr(message, EXTRA, "unheard of")


def squeezed(kind: Any, content: bytes) -> Any:
    """What a peer of that contract understands of a message, and nothing else of it."""
    message = kind.FromString(content)
    message.DiscardUnknownFields()
    fill(message)
    return message


# ---------------------------------------------------------------- frames


class Frame(NamedTuple):
    """One recorded message; `says` is its content as JSON."""

    method: str
    is_request: bool
    content: bytes
    says: dict[str, Any]


def frame(method: str, *, is_request: bool, message: Message) -> Frame:
    return Frame(method, is_request, message.SerializeToString(deterministic=True), plain(message))


def plain(message: Message) -> dict[str, Any]:
    return dict(MessageToDict(message, preserving_proto_field_name=True))


def write_frames(frames: list[Frame]) -> None:
    lines = [
        json.dumps(one._asdict() | {"content": base64.b64encode(one.content).decode()})
        for one in frames
    ]
    FRAMES.write_text("".join(line + "\n" for line in lines))


def read_frames() -> list[Frame]:
    found = [Frame(**json.loads(line)) for line in FRAMES.read_text().splitlines()]
    return [one._replace(content=base64.b64decode(one.content)) for one in found]
