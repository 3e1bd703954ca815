"""Pipeline parallelism: stages of the model on ranks, micro-batches through them in the order of a schedule.

In: a recipe's layout, the parts of a decoder. Out: what runs a step's forwards and backwards, and a validation's
forwards, by the very action list that `drumline.schedules` checks, simulates and draws.
"""

from drumline.parallel.pipeline.build import (
    choose_schedule,
    cut,
    joined_places,
    make_pipeline,
    own_stage_gradients,
)
from drumline.parallel.pipeline.execute import Pipeline
from drumline.parallel.pipeline.measure import Measure, Watch, join
from drumline.parallel.pipeline.model import Stages, share_embedding

__all__ = [
    "Measure",
    "Pipeline",
    "Stages",
    "Watch",
    "choose_schedule",
    "cut",
    "join",
    "joined_places",
    "make_pipeline",
    "own_stage_gradients",
    "share_embedding",
]
