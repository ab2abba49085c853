"""Peer engines on a model folder, run by `peer_main` in their own interpreter.

A question to time a peer is `{"prompts": [[id, ...], ...], "reads": r,
"output_tokens": n, "turn_s"}`; all prompts have one length. If r is above 0, the
prompts are prefilled and answered with r greedy tokens. Then a batch of as many
sequences of that length decodes for n steps, or until the time limit of the turn, after
a context of K and V that were not computed for it. The answer is `{"prefill_s",
"tokens", "decode_s", "num_decoded", "occupancy"}`: seconds until every prompt has its
first token (None without prefill), the tokens, and the seconds and tokens of steps in
which every sequence decoded, without the first step.

`{"sequences": [[id, ...], ...]}` asks transformers for the log-probability of each
token but the first, `{"logprobs"}`. `{"prompts", "sampled_tokens": n, "seed"}` asks
llama.cpp for n tokens that are drawn at temperature 1 for each prompt, of any length:
`{"tokens", "logprobs", "seconds"}`.
"""

import ctypes
import importlib
import json
import tempfile
import time
from pathlib import Path

MODEL_PEERS = {
    name: (Path(__file__), kind)
    for name, kind in (("transformers", "Transformers"), ("llama.cpp", "LlamaCpp"))
}
"""File and class of each peer, by name."""
MIN_STEPS = 4  # smallest number of timed steps


def measure_peer(peer, question):
    """Answers a question by timing a peer."""
    prompts = question["prompts"]
    reads = question["reads"]
    prefill_s = None
    tokens = [[] for _ in prompts]
    if reads:
        prefill_s, tokens = peer.read(prompts, reads)
    step = peer.decoding(prompts)
    step()  # warm-up: the first step copies and plans
    start = time.perf_counter()
    num = 0
    while num < question["output_tokens"]:
        step()
        num += 1
        if num >= MIN_STEPS and time.perf_counter() - start > question["turn_s"]:
            break
    return {
        "prefill_s": prefill_s,
        "tokens": tokens,
        "decode_s": time.perf_counter() - start,
        "num_decoded": num * len(prompts),
        "occupancy": 1.0,
    }


class Transformers:
    """Hugging Face transformers with its default cache, greedy.

    Decoding calls the model directly, without `generate`, after a cache of random
    numbers.
    """

    def __init__(self, folder, num_threads):
        import torch
        import transformers

        torch.set_num_threads(int(num_threads))
        self._torch = torch
        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        # Answers have no end-of-sequence token.
        self._model.generation_config.eos_token_id = None

    def answer(self, question):
        """Answers a question."""
        if "sequences" in question:
            return {"logprobs": list(map(self._score, question["sequences"]))}
        return measure_peer(self, question)

    def _score(self, tokens):
        """Returns the log-probabilities of a sequence's tokens but the first."""
        torch = self._torch
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1]
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].tolist()

    def read(self, prompts, num_tokens):
        """Runs `generate`; returns the time until the first tokens, and the tokens."""
        torch = self._torch
        stamps = []

        def stamp(ids, scores, **_):
            stamps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(prompts)
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                stopping_criteria=[stamp],
            )
        return stamps[0] - start, out[:, ids.shape[1] :].tolist()

    def decoding(self, prompts):
        """Returns a decode step of a batch, after a cache of random K and V."""
        import transformers

        torch = self._torch
        config = self._model.config
        heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // config.num_attention_heads
        cache = transformers.DynamicCache()
        random_kv = torch.randn(len(prompts), heads, len(prompts[0]), head_dim)
        for layer in range(config.num_hidden_layers):
            cache.update(random_kv.clone(), random_kv.clone(), layer)
        tokens = torch.tensor([[prompt[-1]] for prompt in prompts])

        def step():
            nonlocal tokens
            with torch.inference_mode():
                out = self._model(
                    input_ids=tokens, past_key_values=cache, use_cache=True
                )
                tokens = out.logits[:, -1].argmax(-1, keepdim=True)

        return step


class LlamaCpp:
    """llama.cpp: several sequences in one batch, greedy, float32 weights and cache."""

    MAX_BATCH = 512  # rows per call, the default of llama.cpp

    def __init__(self, folder, num_threads):
        llama_cpp = importlib.import_module("llama_cpp")
        self._lib = llama_cpp
        self.version = llama_cpp.__version__
        self._num_threads = int(num_threads)
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary, "model.gguf")
            write_gguf(Path(folder), path)
            params = llama_cpp.llama_model_default_params()
            params.use_mmap = False  # the file is deleted after loading
            self._model = llama_cpp.llama_model_load_from_file(
                str(path).encode(), params
            )
        if not self._model:
            raise ValueError("llama.cpp cannot load the model")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._context = self._batch = self._size = None

    def answer(self, question):
        """Answers a question; the context is reused if the sizes are unchanged."""
        prompts = question["prompts"]
        is_sampled = "sampled_tokens" in question
        if is_sampled:
            room = question["sampled_tokens"]
        else:
            room = question["output_tokens"] + question["reads"] + 2
        size = len(prompts), max(map(len, prompts)) + room
        if self._size != size:
            self._make_context(*size)
            self._size = size
            self._kept = 0
        if is_sampled:
            return self._sample(prompts, room, question["seed"])
        return measure_peer(self, question)

    def _sample(self, prompts, num_tokens, seed):
        """Draws an answer to each prompt at temperature 1."""
        import numpy as np

        rng = np.random.default_rng(seed)
        start = time.perf_counter()
        self._kept = 0
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)
        logits = self._prefill(self._context, self._batch, prompts)
        tokens = [[] for _ in prompts]
        logprobs = [[] for _ in prompts]
        for step in range(num_tokens):
            shifted = logits - logits.max(1, keepdims=True)
            all_logprobs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
            # The largest of log-probabilities with Gumbel noise is a sample.
            drawn = (all_logprobs + rng.gumbel(size=logits.shape)).argmax(1).tolist()
            for i, token in enumerate(drawn):
                tokens[i].append(token)
                logprobs[i].append(float(all_logprobs[i, token]))
            if step + 1 < num_tokens:
                rows = [
                    (i, token, len(prompts[i]) + step, True)
                    for i, token in enumerate(drawn)
                ]
                logits = self._feed(self._context, self._batch, rows)
        seconds = time.perf_counter() - start
        return {"tokens": tokens, "logprobs": logprobs, "seconds": seconds}

    def _make_context(self, num, length):
        lib = self._lib
        if self._context:
            lib.llama_batch_free(self._batch)
            lib.llama_free(self._context)
        params = lib.llama_context_default_params()
        params.n_ctx = num * -(-length // 256) * 256
        params.n_batch = params.n_ubatch = self.MAX_BATCH
        params.n_seq_max = num
        params.n_threads = params.n_threads_batch = self._num_threads
        params.type_k = params.type_v = lib.GGML_TYPE_F32
        self._context = lib.llama_init_from_model(self._model, params)
        self._batch = lib.llama_batch_init(self.MAX_BATCH, 0, 1)
        if not self._context:
            raise ValueError("llama.cpp cannot make a context")

    def read(self, prompts, num_tokens):
        """Prefills prompts in batches of `MAX_BATCH` rows, then decodes row by row.

        Returns:
          Seconds until the first tokens, and the tokens.
        """
        lib = self._lib
        context = self._context
        batch = self._batch
        memory = lib.llama_get_memory(context)
        lib.llama_memory_clear(memory, True)
        self._kept = 0
        start = time.perf_counter()
        first = self._prefill(context, batch, prompts).argmax(1).tolist()
        tokens = [[token] for token in first]
        prefill_s = time.perf_counter() - start
        for step in range(num_tokens - 1):
            self._decode(tokens, len(prompts[0]) + step)
        self._kept = len(prompts[0])
        return prefill_s, tokens

    def decoding(self, prompts):
        """Returns a decode step of a batch after one prompt, which is copied to all.

        llama.cpp cannot fill its cache with random numbers. Each sequence has its own K
        and V in a separate stream, and a copy moves the data.
        """
        lib = self._lib
        context = self._context
        length = len(prompts[0])
        memory = lib.llama_get_memory(context)
        if not self._kept:
            lib.llama_memory_clear(memory, True)
            self._prefill(context, self._batch, prompts[:1])
            for i in range(1, len(prompts)):
                lib.llama_memory_seq_cp(memory, 0, i, -1, -1)
            self._kept = length
        for i in range(len(prompts)):
            lib.llama_memory_seq_rm(memory, i, length, -1)
        tokens = [[prompt[-1]] for prompt in prompts]
        place = length

        def step():
            nonlocal place
            self._decode(tokens, place)
            place += 1

        return step

    def _decode(self, tokens, place):
        """Feeds the last token of each sequence at a position, and appends the next."""
        rows = [(i, sequence[-1], place, True) for i, sequence in enumerate(tokens)]
        logits = self._feed(self._context, self._batch, rows)
        for i, token in enumerate(logits.argmax(1).tolist()):
            tokens[i].append(token)

    def _prefill(self, context, batch, prompts):
        """Feeds prompts in batches of `MAX_BATCH` rows; returns their last logits."""
        import numpy as np

        rows = [
            (i, token, place, place == len(prompt) - 1)
            for i, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        first = []
        for start in range(0, len(rows), self.MAX_BATCH):
            part = rows[start : start + self.MAX_BATCH]
            first.append(self._feed(context, batch, part).copy())
        return np.concatenate(first)

    def _feed(self, context, batch, rows):
        """Feeds rows of (sequence, token, position, True if logits are needed).

        Returns:
          The logits, in memory that the next call overwrites.
        """
        import numpy as np

        lib = self._lib
        batch.n_tokens = len(rows)
        for i, (sequence, token, place, wanted) in enumerate(rows):
            batch.token[i] = token
            batch.pos[i] = place
            batch.logits[i] = wanted
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = sequence
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        lib.llama_synchronize(context)
        shape = (sum(row[3] for row in rows), self._vocab_size)
        if not shape[0]:
            return np.empty(shape, np.float32)
        return np.ctypeslib.as_array(lib.llama_get_logits(context), shape)


def write_gguf(folder, path):
    """Writes a Llama folder with float32 weights as GGUF, without a tokenizer."""
    gguf = importlib.import_module("gguf")
    load_file = importlib.import_module("safetensors.numpy").load_file

    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise ValueError("only plain Llama models are converted")
    num_heads = config["num_attention_heads"]
    num_kv = config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    rope = config.get("rope_parameters") or config
    out = gguf.GGUFWriter(str(path), "llama")
    settings = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "head_count": num_heads,
        "head_count_kv": num_kv,
        "key_length": head_dim,
        "value_length": head_dim,
        "rope_dimension_count": head_dim,
        "rope_freq_base": rope["rope_theta"],
        "layer_norm_rms_eps": config["rms_norm_eps"],
        "vocab_size": config["vocab_size"],
        "file_type": gguf.LlamaFileType.ALL_F32,
        "tokenizer_model": "no_vocab",
    }
    for name, value in settings.items():
        getattr(out, "add_" + name)(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for file in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            for part, heads in (("q_proj", num_heads), ("k_proj", num_kv)):
                if name.endswith(f"{part}.weight"):
                    # GGUF interleaves rotary pairs; Hugging Face separates them by
                    # half a head.
                    halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
                    tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
            stem, _, kind = name.rpartition(".")
            out.add_tensor(f"{names.get_name(stem)}.{kind}", tensor.copy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
