"""SparseParams says what the engine's knobs say."""

import pytest

from engine_service.core.step import FULL
from engine_service.decoding.canvas_cache import CanvasCache
from engine_service.decoding.full_canvas import FullCanvas
from tidemill import SamplingParams, SparseParams
from tidemill.runtime.errors import InvalidRequest

CANVAS = FullCanvas.for_model(mask_block=FULL, mask_token_id=9, logits_shift=0)


def test_every_knob_arrives() -> None:
    sparse = SparseParams(
        enabled=True,
        retention_ratio=0.25,
        delay_step=3,
        block_length=8,
        head_select=True,
        pool_kernel=5,
        refresh_interval=4,
    )
    asked = SamplingParams(sparse=sparse, method_params={"threshold": 0.7})
    params = CANVAS.parse(asked.knobs)
    assert (params.block_length, params.threshold) == (8, 0.7)
    assert params.cache == CanvasCache(
        name="sparse",
        refresh_interval=4,
        retention_ratio=0.25,
        delay_step=3,
        head_select=True,
        pool_kernel=5,
    )


def test_defaults_are_those_of_the_engine() -> None:
    knobs = SamplingParams(sparse=SparseParams(enabled=True)).knobs
    assert CANVAS.parse(knobs) == CANVAS.parse({"cache": "sparse"})


def test_not_enabled_is_dense() -> None:
    sparse = SparseParams(retention_ratio=0.1, block_length=4)
    assert CANVAS.parse(SamplingParams(sparse=sparse).knobs) == CANVAS.parse({"block_length": 4})
    assert SamplingParams().knobs == {}


def test_a_wrong_value_is_named() -> None:
    sparse = SparseParams(enabled=True, pool_kernel=4)
    with pytest.raises(InvalidRequest, match="pool_kernel is 4"):
        CANVAS.parse(SamplingParams(sparse=sparse).knobs)
