"""Batches for one data rank: pure by step, prefetched in order by threads.

Step s takes the global samples s * global_batch to (s + 1) * global_batch - 1, and data rank r the r-th equal slice
of them, so every data degree sees the same global batches and the position is one integer. Threads only compute what
`batches` would; they draw nothing from any generator.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Protocol

import numpy as np

from drumline.data.batch import Ahead, Batch
from drumline.data.stream import Rows
from drumline.recipe.errors import DrumlineError


class Samples(Protocol):
    """Rows by global index: a `Dataset`, or rows that are made up."""

    seq_len: int
    document_mask: bool

    @property
    def repeats(self) -> bool: ...

    @property
    def num_rows(self) -> int: ...

    def rows(self, index_B: np.ndarray) -> Rows:
        """The samples of these global indices."""
        ...


class Loader:
    """The micro-batches of a data rank, step by step.

    Args:
        dataset: the samples.
        global_batch: rows in one step, over all data ranks.
        micro_batch: rows that one rank runs at a time.
        data_rank: this rank's place among the ranks that see different data.
        data_degree: number of these.
        samples: this rank's samples of each global batch, by their place in it, in whole micro-batches; None: the
            data_rank-th of equal slices.
        first_step: the step (from 0) that iteration starts with.
        num_workers: threads that prepare steps ahead; 0: none.
        prefetch: steps that are kept ready.
        share: what a rank keeps of a micro-batch whose rows it shares with others; None: all of it.
        pin_memory: put batches into page-locked memory, for copies to an accelerator that do not wait.

    Raises:
        DrumlineError: the batch cannot be dealt evenly, or the dataset has less than one global batch.
    """

    def __init__(
        self,
        dataset: Samples,
        *,
        global_batch: int,
        micro_batch: int,
        data_rank: int = 0,
        data_degree: int = 1,
        samples: range | None = None,
        first_step: int = 0,
        num_workers: int = 0,
        prefetch: int = 2,
        share: Callable[[Batch], Batch] | None = None,
        pin_memory: bool = False,
    ):
        if not 0 <= data_rank < data_degree:
            raise ValueError(f"data rank {data_rank} is not one of {data_degree}")
        if samples is None and global_batch % (data_degree * micro_batch):
            raise DrumlineError(
                f"data.global_batch = {global_batch} is not a multiple of data.micro_batch = {micro_batch} times "
                f"the {data_degree} data-parallel ranks"
            )
        # A small source may repeat within a batch, as its weight says; all of them together may not.
        if dataset.repeats and dataset.num_rows < global_batch:
            raise DrumlineError(
                f"the training data has {dataset.num_rows:,} samples of {dataset.seq_len:,} tokens, fewer than "
                f"data.global_batch = {global_batch:,}: give more text, or a smaller data.seq_len or data.global_batch"
            )
        self.dataset = dataset
        self.step = first_step
        self._global_batch = global_batch
        self._micro_batch = micro_batch
        own = global_batch // data_degree
        samples = range(data_rank * own, (data_rank + 1) * own) if samples is None else samples
        self._local_batch = len(samples)
        self._offset = samples.start
        self._num_workers = num_workers
        self._prefetch = prefetch
        self._share = share
        self._pin_memory = pin_memory
        self._pool: ThreadPoolExecutor | None = None
        self._pending: deque[Future[list[Batch]]] = deque()

    def batches(self, step: int) -> list[Batch]:
        """Returns this rank's micro-batches of a step: a pure function of the step.

        Args:
            step: number of the step, from 0.

        Returns:
            local batch / micro_batch batches.

        Raises:
            DrumlineError: a shard is damaged.
        """
        import torch

        first = step * self._global_batch + self._offset
        rows = self.dataset.rows(np.arange(first, first + self._local_batch, dtype=np.int64))
        starts = torch.from_numpy(rows.starts_BT) if self.dataset.document_mask else None
        ahead = tuple(Ahead(torch.from_numpy(tokens), torch.from_numpy(labels)) for tokens, labels in rows.ahead)
        batch = Batch(torch.from_numpy(rows.tokens_BT), torch.from_numpy(rows.labels_BT), starts, ahead)
        if self._share is not None:
            batch = self._share(batch)
        if self._pin_memory:
            batch = batch.map(torch.Tensor.pin_memory)
        size = self._micro_batch
        return [batch.map(lambda x, at=at: x[at : at + size]) for at in range(0, self._local_batch, size)]

    def __iter__(self) -> Iterator[list[Batch]]:
        """Goes on from `self.step`, without end."""
        return self

    def __next__(self) -> list[Batch]:
        """Goes one step on.

        Returns:
            The micro-batches of the step that `self.step` named.

        Raises:
            DrumlineError: a shard is damaged; says at which step.
        """
        if not self._num_workers:
            batches = self._explained(self.step, self.batches)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._num_workers, thread_name_prefix="drumline-loader")
            while len(self._pending) <= self._prefetch:
                self._pending.append(self._pool.submit(self.batches, self.step + len(self._pending)))
            batches = self._explained(self.step, lambda step: self._pending[0].result())
            self._pending.popleft()
        self.step += 1
        return batches

    def seek(self, step: int) -> None:
        """Goes on from another step; what was prefetched is dropped."""
        self._drop()
        self.step = step

    def close(self) -> None:
        """Ends the threads; iteration may be taken up again."""
        self._drop()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def __enter__(self) -> "Loader":
        """Closes at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes."""
        self.close()

    def _drop(self) -> None:
        for future in self._pending:
            future.cancel()
        self._pending.clear()

    def _explained(self, step: int, work) -> list[Batch]:
        try:
            return work(step)
        except DrumlineError as error:
            raise DrumlineError(f"cannot read the data of step {step}: {error}") from error
        except Exception as error:
            error.add_note(f"while preparing the data of step {step} (global samples from {step * self._global_batch})")
            raise
