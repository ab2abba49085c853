"""What a recurrent language model costs: its weights, and the operations of a step."""

from scaling.costs.parameters import Parameters, Weight
from scaling.training.recurrent import NUM_GATES, RecurrentConfig


def weights(config: RecurrentConfig) -> tuple[Weight, ...]:
    """Lists every weight once per place, as `parameters.weights` does for transformers.

    In the formulas v is the vocabulary, h the hidden size and g the gates: 4 of an
    LSTM, 3 of a GRU.
    """
    h, v, gates = config.hidden_size, config.vocab_size, NUM_GATES[config.kind]
    square = gates * h * h
    head = int(not config.tie_embeddings)
    norms = 2 * h * (config.norm == "layer")
    listed = [
        Weight("embedding", "tokens", "v h", v * h, "first"),
        Weight("cell", "inputs", "g h h", square, "every", applied=1),
        Weight("cell", "state", "g h h", square, "every", applied=1),
        Weight("cell", "bias", "g h", gates * h, "every"),
        Weight("norms", "layer norm", "2 h", norms, "every"),
        Weight("norms", "final norm", "2 h", norms, "last"),
        Weight("head", "head", "v h", v * h, "last", head, head, 1),
    ]
    if config.kind == "gru":
        listed.append(Weight("cell", "candidate bias", "h", h, "every"))
    return tuple(weight for weight in listed if weight.size)


def parameters(config: RecurrentConfig) -> Parameters:
    """Counts parameters by every convention.

    An LSTM of two layers of 256 over 257 tokens, tied: 1,118,720 in total, 1,052,928
    of them outside the embedding.
    """
    places = {"first": 1, "every": config.num_layers, "last": 1}
    found = [(w, w.size * places[w.place]) for w in weights(config)]
    total = sum(size * w.stored for w, size in found)
    tables = ("embedding", "head")
    outside = sum(size for w, size in found if w.part not in tables)
    matmul = sum(size * w.applied for w, size in found)
    looked_up = config.vocab_size * config.hidden_size
    return Parameters(
        total=total,
        non_embedding=outside,
        matmul=matmul,
        active=total,
        active_non_embedding=total - looked_up,
        matmul_total=matmul,
        ahead=0,
    )


def forward_flops(config: RecurrentConfig, *, tokens: int) -> int:
    """Counts the products of a forward pass, two operations per multiply-add.

    Unlike a transformer's, a token's cost does not grow with those before it.
    """
    return 2 * parameters(config).matmul * tokens
