"""Writes the stream events of a call that is not complete, and its item.

Arguments of functions and the texts of custom tools arrive in deltas. The other items have their
arguments as members, so their events are sent when the call is complete.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import msgspec
from msgspec import UNSET

from gateway.api.responses.responses import (
    ApplyPatchCall,
    CustomToolCall,
    FunctionCall,
    ItemStatus,
    LocalShellCall,
    OutputItem,
    ShellCall,
    ToolCallItem,
    ToolSearchCall,
)
from gateway.api.responses.tools import CallKind, ToolShape
from gateway.formats.events import ToolCall


class CallEvents(Protocol):
    """The writer of a response's events."""

    def next_place(self, kind: str) -> dict[str, Any]: ...
    def emit(self, kind: str, **members: Any) -> None: ...
    def emit_item(self, change: Literal["added", "done"], item: OutputItem) -> OutputItem: ...


class OpenCall:
    """A call that is not complete. `_item` returns its item with the text so far."""

    KIND: CallKind

    def __init__(self, events: CallEvents, call: ToolCall, shape: ToolShape) -> None:
        self._events = events
        self._call = call
        self._shape = shape
        self._deltas: list[str] = []
        self._at = events.next_place(self.KIND)
        events.emit_item("added", self._item("in_progress", ""))

    def push(self, fragment: str) -> None:
        """Add a piece of the call's arguments, or of the text for a custom tool."""
        self._deltas.append(fragment)

    def close(self, status: ItemStatus) -> OutputItem:
        """Write the last events, and return the item."""
        text = "".join(self._deltas)
        self._emit_text(text)
        return self._events.emit_item("done", self._item(status, text))

    def _emit_text(self, text: str) -> None:
        """Write the event with the whole text of a call whose text is streamed."""

    def _item(self, status: ItemStatus, text: str) -> ToolCallItem:
        raise NotImplementedError

    @property
    def _ids(self) -> dict[str, str]:
        return {"id": self._at["item_id"], "call_id": self._call.id}


class _OpenFunction(OpenCall):
    KIND = "function_call"

    def push(self, fragment: str) -> None:
        super().push(fragment)
        self._events.emit("response.function_call_arguments.delta", **self._at, delta=fragment)

    def _emit_text(self, text: str) -> None:
        kind = "response.function_call_arguments.done"
        self._events.emit(kind, **self._at, name=self._shape.name, arguments=text)

    def _item(self, status: ItemStatus, text: str) -> FunctionCall:
        return FunctionCall(
            **self._ids,
            name=self._shape.name,
            namespace=self._shape.namespace or UNSET,
            arguments=text,
            status=status,
        )


class _OpenCustom(OpenCall):
    KIND = "custom_tool_call"

    def push(self, fragment: str) -> None:
        super().push(fragment)
        self._events.emit("response.custom_tool_call_input.delta", **self._at, delta=fragment)

    def _emit_text(self, text: str) -> None:
        self._events.emit("response.custom_tool_call_input.done", **self._at, input=text)

    def _item(self, status: ItemStatus, text: str) -> CustomToolCall:
        return CustomToolCall(
            **self._ids,
            name=self._shape.name,
            namespace=self._shape.namespace or UNSET,
            input=text,
            status=status,
        )


class _OpenLocalShell(OpenCall):
    KIND = "local_shell_call"

    def _item(self, status: ItemStatus, text: str) -> LocalShellCall:
        action = {"command": [], "env": {}, **_object(text), "type": "exec"}
        return LocalShellCall(**self._ids, action=action, status=status)


class _OpenShell(OpenCall):
    KIND = "shell_call"

    def _item(self, status: ItemStatus, text: str) -> ShellCall:
        limits = {"timeout_ms": None, "max_output_length": None}
        action = {"commands": [], **limits, **_object(text)}
        return ShellCall(**self._ids, action=action, environment={"type": "local"}, status=status)


class _OpenPatch(OpenCall):
    KIND = "apply_patch_call"

    def _item(self, status: ItemStatus, text: str) -> ApplyPatchCall:
        operation = {"type": "update_file", "path": "", **_object(text)}
        if operation["type"] != "delete_file":
            operation.setdefault("diff", "")
        return ApplyPatchCall(**self._ids, operation=operation, status=status)


class _OpenSearch(OpenCall):
    KIND = "tool_search_call"

    def _item(self, status: ItemStatus, text: str) -> ToolSearchCall:
        return ToolSearchCall(
            **self._ids, execution="client", arguments=_object(text), status=status
        )


_BY_KIND: dict[CallKind, type[OpenCall]] = {
    each.KIND: each
    for each in (
        _OpenFunction,
        _OpenCustom,
        _OpenLocalShell,
        _OpenShell,
        _OpenPatch,
        _OpenSearch,
    )
}


def open_call(events: CallEvents, call: ToolCall, shape: ToolShape) -> OpenCall:
    """Start the item of a call, and write its first event."""
    return _BY_KIND[shape.kind](events, call, shape)


def _object(text: str) -> dict[str, Any]:
    """Return arguments as an object. Text that is not complete gives an empty one."""
    try:
        value = msgspec.json.decode(text) if text else {}
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return {}
    return value if isinstance(value, dict) else {}
