"""Our proto is a part of Envoy's own, and the committed module is what the proto gives."""

from __future__ import annotations

import pytest
from envoy_data_plane.envoy.config.core import v3 as core
from envoy_data_plane.envoy.extensions.filters.http.ext_proc import v3 as ext_proc_filter
from envoy_data_plane.envoy.service.ext_proc import v3 as ext_proc
from envoy_data_plane.envoy.type import v3 as types
from google.protobuf.descriptor import Descriptor, FieldDescriptor

from proto import ext_proc_pb2
from proto.generate import ROOT, generate

MESSAGES = list(ext_proc_pb2.DESCRIPTOR.message_types_by_name.values())
WIRE_TYPES = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_ENUM: "enum",
    FieldDescriptor.TYPE_INT32: "enum",  # HttpStatus.code
    FieldDescriptor.TYPE_MESSAGE: "message",
}


def envoys(message: Descriptor) -> type:
    for module in (ext_proc, ext_proc_filter, core, types):
        if hasattr(module, message.name):
            return getattr(module, message.name)
    raise AssertionError(f"Envoy has no {message.name}")


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.name)
def test_fields_have_envoys_names_numbers_and_types(message):
    theirs = envoys(message)().__class__
    metadata = {
        name: field.metadata["betterproto"] for name, field in theirs.__dataclass_fields__.items() if field.metadata
    }
    for field in message.fields:
        known = metadata[field.name]
        assert field.number == known.number, field.full_name
        expected = "map" if field.message_type and field.message_type.GetOptions().map_entry else WIRE_TYPES[field.type]
        assert known.proto_type == expected, field.full_name
        assert (field.containing_oneof is not None) == (known.group is not None), field.full_name


@pytest.mark.parametrize("enum", list(ext_proc_pb2.ProcessingMode.DESCRIPTOR.enum_types), ids=lambda enum: enum.name)
def test_enums_have_envoys_numbers(enum):
    theirs = getattr(ext_proc_filter, f"ProcessingMode{enum.name}")
    assert {value.name: value.number for value in enum.values} == {member.name: member.value for member in theirs}


def test_names_do_not_clash_with_envoys_own_module():
    assert ext_proc_pb2.DESCRIPTOR.package == "tierpick.ext_proc.v1"
    assert not ext_proc_pb2.DESCRIPTOR.name.startswith("envoy/")


@pytest.mark.parametrize("name", ["ext_proc_pb2.py", "ext_proc_pb2.pyi"])
def test_the_generated_module_is_up_to_date(tmp_path, name):
    pytest.importorskip("grpc_tools")
    generate(tmp_path)
    assert (ROOT / "proto" / name).read_text() == (tmp_path / "proto" / name).read_text()
