"""Exports as the command line asks for them."""

from typing import Any, cast

import pytest

from specfleet.ctl import gatework
from specfleet.ctl.client import Client
from specfleet.wire.gate_pb2 import ExportDraftRequest
from specfleet.wire.run_pb2 import Checkpoint, RunSnapshot


class Recorder:
    """Stands where a client of the gate does and keeps what it was asked."""

    gate = type("Stub", (), {"ExportDraft": None})

    def call(self, method: Any, request: ExportDraftRequest, timeout_s: float) -> ExportDraftRequest:
        return request


@pytest.mark.parametrize(
    ("strategy", "layout", "expected"),
    [("eagle3", "", "sglang"), ("peagle", "", "vllm"), ("dspark", "vllm", "vllm"), ("domino", "", "sglang")],
)
def test_an_export_lies_in_the_folder_of_its_layout(strategy: str, layout: str, expected: str) -> None:
    run = RunSnapshot(run_id="r", strategy=strategy, output_dir="/runs/r")
    asked = gatework.export_draft(cast(Client, Recorder()), run, Checkpoint(uri="c"), layout, untrained=True)
    assert isinstance(asked, ExportDraftRequest)
    assert (asked.layout, asked.output_dir) == (expected, f"/runs/r/exports/{expected}-untrained")
