"""The schedules of `torch.distributed.pipelining`, without ranks: their classes over stages that compute nothing."""

import logging
from collections.abc import Sequence

from torch import nn
from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.stage import _PipelineStageBase

from drumline.schedules import Action, Kind

MULTI = {
    "interleaved-1f1b": torch_schedules.ScheduleInterleaved1F1B,
    "interleaved-zero-bubble": torch_schedules.ScheduleInterleavedZeroBubble,
    "zbv": torch_schedules.ScheduleZBVZeroBubble,
    "dualpipev": torch_schedules.ScheduleDualPipeV,
    "looped-bfs": torch_schedules.ScheduleLoopedBFS,
}
SINGLE = {"gpipe": torch_schedules.ScheduleGPipe, "1f1b": torch_schedules.Schedule1F1B}


class Stage(_PipelineStageBase):
    """A stage that writes down what it is asked to do."""

    is_first = is_last = False  # not the last, so that no loss is asked for
    _create_grad_recv_info = _prepare_forward_infra = _prepare_backward_infra = None

    def __init__(self, index: int, num_stages: int, num_ranks: int):
        self.stage_index = index
        self.num_stages = num_stages
        self.group_size = num_ranks
        self.group_rank = 0
        self.group = None
        self.has_backward = True
        self.submod = nn.Identity()
        self.called: list[Action] = []

    def get_fwd_recv_ops(self, microbatch):
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def forward_one_chunk(self, microbatch, *args, **kwargs):
        self.called.append(Action(self.stage_index, Kind.FORWARD, microbatch))

    def backward_one_chunk(self, microbatch, **kwargs):
        self.called.append(Action(self.stage_index, Kind.BACKWARD, microbatch))

    def perform_reduce_grad(self, scale):
        pass


def executed(name: str, num_ranks: int, num_microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """What torch's GPipe and 1F1B really run on each rank, by running them."""
    order = []
    for rank in range(num_ranks):
        stage = Stage(rank, num_ranks, num_ranks)
        schedule = SINGLE[name](stage, num_microbatches)
        schedule._initialize_stage = lambda *args: None
        schedule._step_microbatches([()] * num_microbatches, [{}] * num_microbatches)
        order.append(tuple(stage.called))
    return tuple(order)


def build(name: str, num_ranks: int, num_microbatches: int, virtual: int):
    """One of torch's schedules with several stages a rank."""
    num_stages = num_ranks * virtual
    logging.disable(logging.WARNING)
    try:
        return MULTI[name]([Stage(index, num_stages, num_ranks) for index in range(virtual)], num_microbatches)
    finally:
        logging.disable(logging.NOTSET)


def generated(name: str, num_ranks: int, num_microbatches: int, virtual: int) -> tuple[tuple[Action, ...], ...]:
    """The compute order of torch's schedule, its pairs written one after the other."""
    order = build(name, num_ranks, num_microbatches, virtual).pipeline_order
    return tuple(
        tuple(
            Action(part.stage_index, Kind(part.computation_type.value), part.microbatch_index)
            for action in order[rank]
            if action is not None
            for part in action.sub_actions or (action,)
        )
        for rank in range(num_ranks)
    )


def to_torch(order: Sequence[Sequence[Action]]) -> dict[int, list]:
    """Our order in torch's types."""
    return {
        rank: [torch_schedules._Action.from_str(str(action)) for action in actions]
        for rank, actions in enumerate(order)
    }
