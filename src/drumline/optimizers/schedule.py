"""The learning rate as a pure function of the step.

Sources: cosine, Loshchilov and Hutter 2017, arXiv:1608.03983, eq. 5 without restarts; warm-up-stable-decay, Hu et
al. 2024, arXiv:2404.06395, section 4.2, with linear decay.
"""

import math

from drumline.recipe.sections import Schedule


def learning_rate(step: int, *, peak: float, num_steps: int, schedule: Schedule) -> float:
    """The learning rate of one optimizer step.

    Args:
        step: index of the step, from 0.
        peak: the highest learning rate.
        num_steps: of the whole run; the last step is `num_steps - 1`.
        schedule: kind, warm-up and decay.

    Returns:
        The rate; step 0 of a warm-up of n steps has peak / n.
    """
    if step < schedule.warmup_steps:
        return peak * (step + 1) / schedule.warmup_steps
    floor = schedule.min_lr_ratio
    if schedule.kind == "constant":
        return peak
    start = schedule.warmup_steps
    if schedule.kind == "wsd":
        start = max(start, num_steps - round(num_steps * schedule.decay_fraction))
        if step < start:
            return peak
    if schedule.kind == "wsd":
        # The floor lies one step past the last: a last step at rate 0 would be thrown away.
        return peak * (1.0 - (1.0 - floor) * (step - start + 1) / (num_steps - start + 1))
    done = (step - start) / (num_steps - start)
    return peak * (floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done)))
