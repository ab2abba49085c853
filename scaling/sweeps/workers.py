"""Runs that are planned as they go and kept in memory: in threads, under one bar.

Whoever compares models chooses what is trained next from what was, and wants its own
score of each; the training is that of a sweep (`branching`).
"""

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

from jaxkv.progress import Progress
from scaling.corpora import Corpus
from scaling.sweeps import branching
from scaling.sweeps.branching import FinishedRun, Scorer
from scaling.training import TrainConfig


class Workers:
    """Trains chains of runs, several at a time.

    Args:
      corpus: what all learn, its stream on the device.
      score: what each run is worth.
      progress: who is told how far all are, and may stop them.
      num_steps: of all runs together, what they share counted once.
      num_threads: chains at a time: while one is compiled on a core another has work
        for the next. No number depends on it.
    """

    def __init__(
        self,
        corpus: Corpus,
        score: Scorer,
        progress: Progress,
        *,
        num_steps: int,
        num_threads: int = 1,
    ):
        self.corpus, self._score, self._progress = corpus, score, progress
        self._lock, self._done = threading.Lock(), 0
        self._num_threads = num_threads
        self._update = progress.bar("training", num_steps, "steps")

    def train(
        self, runs: Sequence[TrainConfig], shown: Callable[[FinishedRun], str]
    ) -> Iterator[FinishedRun]:
        """Trains runs of one model, rate and seed, bit for bit as each alone.

        Args:
          runs: of rising length; a longer one is the trunk that a shorter leaves.
          shown: what a person sees when one is over.

        Yields:
          The runs; one that diverged has no score.

        Raises:
          branching.StopRequested: the person said so.
          RuntimeError: one failed, as for want of memory.
        """

        def advance(num_steps: int) -> bool:
            with self._lock:
                self._done += num_steps
                self._update(self._done)
            return not self._progress.stopped

        horizons = [[run] for run in runs]
        for finished in branching.train_branches(
            horizons,
            self.corpus,
            is_vmapped=False,
            score=self._score,
            advance=advance,
        ):
            if finished.status == "failed":
                raise RuntimeError(finished.error)
            with self._lock:
                self._progress.show(shown(finished))
            yield finished

    def map[J, R](self, work: Callable[[J], R], jobs: Iterable[J]) -> Iterator[R]:
        """Does work that trains, in threads.

        Yields:
          Results in the order of the jobs, without those that were stopped.
        """

        def one(job: J) -> tuple[R] | None:
            if self._progress.stopped:
                return None
            try:
                return (work(job),)
            except branching.StopRequested:
                return None

        with concurrent.futures.ThreadPoolExecutor(self._num_threads) as pool:
            for found in pool.map(one, jobs):
                if found is not None:
                    yield found[0]
