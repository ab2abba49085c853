"""Other engines on a model folder, for `peer_main` in their own interpreter.

A question is `{"prompts": [[id, ...], ...], "output_tokens": n}`; prompts have one
length, and answers run to their end. It is answered with `{"prefill_s", "decode_s",
"num_decoded", "tokens"}`: seconds until every prompt has its first token, seconds for
the others, their number, and the greedy tokens.
"""

import ctypes
import importlib
import json
import tempfile
import time
from pathlib import Path


def answered(prefill_s, decode_s, tokens):
    """The answer to a question."""
    return {
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "num_decoded": len(tokens) * (len(tokens[0]) - 1),
        "tokens": tokens,
    }


class Transformers:
    """Hugging Face transformers: `generate` with its default cache, greedy."""

    def __init__(self, folder, num_threads):
        import torch
        import transformers

        torch.set_num_threads(int(num_threads))
        self._torch = torch
        self.version = f"{transformers.__version__}, torch {torch.__version__}"
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        # Nothing ends an answer early.
        self._model.generation_config.eos_token_id = None

    def answer(self, asked):
        """Serves, and notes when the first tokens are there."""
        torch, stamps = self._torch, []

        def stamp(ids, scores, **_):
            stamps.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        ids = torch.tensor(asked["prompts"])
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=asked["output_tokens"],
                min_new_tokens=asked["output_tokens"],
                do_sample=False,
                use_cache=True,
                pad_token_id=0,
                stopping_criteria=[stamp],
            )
        tokens = out[:, ids.shape[1] :].tolist()
        return answered(stamps[0] - start, time.perf_counter() - stamps[0], tokens)


class LlamaCpp:
    """llama.cpp: several sequences in one batch, greedy, float32 weights and cache."""

    MAX_BATCH = 512  # rows that one call may feed, its default

    def __init__(self, folder, num_threads):
        llama_cpp = importlib.import_module("llama_cpp")
        self._lib, self.version = llama_cpp, llama_cpp.__version__
        self._num_threads = int(num_threads)
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        with tempfile.TemporaryDirectory() as temporary:
            path = Path(temporary, "model.gguf")
            write_gguf(Path(folder), path)
            params = llama_cpp.llama_model_default_params()
            params.use_mmap = False  # the file is gone after this
            self._model = llama_cpp.llama_model_load_from_file(
                str(path).encode(), params
            )
        if not self._model:
            raise ValueError("llama.cpp cannot load the model")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)

    def answer(self, asked):
        """Feeds the prompts in batches of `MAX_BATCH` rows, then a row a sequence."""
        prompts, output_tokens = asked["prompts"], asked["output_tokens"]
        lib, num = self._lib, len(prompts)
        params = lib.llama_context_default_params()
        params.n_ctx = num * -(-(len(prompts[0]) + output_tokens) // 256) * 256
        params.n_batch = params.n_ubatch = self.MAX_BATCH
        params.n_seq_max = num
        params.n_threads = params.n_threads_batch = self._num_threads
        params.type_k = params.type_v = lib.GGML_TYPE_F32
        context = lib.llama_init_from_model(self._model, params)
        batch = lib.llama_batch_init(self.MAX_BATCH, 0, 1)
        if not context:
            raise ValueError("llama.cpp cannot make a context")
        try:
            start = time.perf_counter()
            tokens = [[token] for token in self._prefill(context, batch, prompts)]
            prefilled = time.perf_counter()
            for step in range(output_tokens - 1):
                place = len(prompts[0]) + step
                rows = [(i, tokens[i][-1], place, True) for i in range(num)]
                for i, token in enumerate(self._feed(context, batch, rows)):
                    tokens[i].append(token)
            end = time.perf_counter()
        finally:
            lib.llama_batch_free(batch)
            lib.llama_free(context)
        return answered(prefilled - start, end - prefilled, tokens)

    def _prefill(self, context, batch, prompts):
        rows = [
            (i, token, place, place == len(prompt) - 1)
            for i, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        first = []
        for start in range(0, len(rows), self.MAX_BATCH):
            first += self._feed(context, batch, rows[start : start + self.MAX_BATCH])
        return first

    def _feed(self, context, batch, rows):
        """Feeds rows of (sequence, token, position, whether its logits are wanted)."""
        import numpy as np

        lib = self._lib
        batch.n_tokens = len(rows)
        for i, (sequence, token, place, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, place, wanted
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        lib.llama_synchronize(context)
        num = sum(row[3] for row in rows)
        if not num:
            return []
        logits = lib.llama_get_logits(context)
        shape = (num, self._vocab_size)
        return np.ctypeslib.as_array(logits, shape).argmax(1).tolist()


def write_gguf(folder, path):
    """Writes a Llama folder of float32 weights as GGUF, without a tokenizer."""
    gguf = importlib.import_module("gguf")
    load_file = importlib.import_module("safetensors.numpy").load_file

    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise ValueError("only plain Llama models are converted")
    num_heads, num_kv = config["num_attention_heads"], config["num_key_value_heads"]
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
                    # Its rotary pairs are neighbours; Hugging Face's lie half a head
                    # apart.
                    halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
                    tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
            stem, _, kind = name.rpartition(".")
            out.add_tensor(f"{names.get_name(stem)}.{kind}", tensor.copy())
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
