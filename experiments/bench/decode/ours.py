"""Our engine, timed as its peers are."""

import jax

from experiments.bench.decode import watching
from experiments.bench.decode.peers import Timing
from jaxkv.engine import state
from jaxkv.models import checkpoints, paged
from jaxkv.sampling import Sampling


class Ours:
    """Our engine, serving batches of one size. The first `measure` compiles.

    Args:
      model: what to serve.
      bounds: of the engine, with a slot for each sequence of the batch.
      dtype: of the pages.
    """

    name = "jaxkv"
    version = f"jax {jax.__version__}"

    def __init__(
        self, model: checkpoints.Loaded, bounds: state.EngineConfig, dtype: str
    ):
        self._engine = watching.WatchedEngine(
            model.params,
            paged.PagedForward(model.config, bounds.numerics),
            paged.make_pages(model.config, bounds, dtype=dtype),
            bounds,
            eos_ids=(),
            vocab_size=model.config.vocab_size,
            keep_trace=True,
        )
        self.host_shares: list[float | None] = []

    def measure(self, prompts: list[list[int]], output_tokens: int) -> Timing:
        """Serves prompts of one length as one batch, greedily."""
        watching.reset_peak()
        prefill_s, *_ = self._serve(prompts, 1)
        with self._engine.watch() as calls:
            _, decode_s, num_decoded, tokens = self._serve(prompts, output_tokens)
        self.host_shares.append(watching.host_share(calls))
        peak = watching.peak_bytes()
        return Timing(prefill_s, decode_s, num_decoded, tokens, peak)

    def _serve(
        self, prompts: list[list[int]], num_tokens: int
    ) -> tuple[float, float, int, list[list[int]]]:
        """Serves once.

        Returns:
          Seconds until every request had its first token, seconds in which later ones
          came, how many those were, and the answers.
        """
        engine = self._engine
        ask = Sampling.greedy(max_tokens=num_tokens, ignore_eos=True)
        tokens: list[list[int]] = [[] for _ in prompts]
        num_held: dict[int, int] = {}  # tokens held after each call, all requests
        engine.trace.clear()
        start_s = first_s = last_s = engine.now()
        for i, prompt in enumerate(prompts):
            engine.submit(prompt, ask, request_id=i)
        first_call = 0
        for event in engine.stream():
            if not event.tokens:
                continue  # tidying up
            call, last_s = len(engine.trace), engine.now()
            if not tokens[event.request_id]:
                first_call, first_s = call, last_s
            tokens[event.request_id] += event.tokens
            num_held[call] = sum(map(len, tokens))
        num_decoded = max(num_held.values()) - num_held[first_call]
        return first_s - start_s, last_s - first_s, num_decoded, tokens
