"""Errors that other simulators published, to print beside those of this project."""

from jaxkv.report import Sheet

_BLIS = "github.com/inference-sim/inference-sim"
_ROWS = (
    ("Vidur", "end to end", "619 %", "4 runs of vLLM that it covers", _BLIS),
    ("LLMServingSim", "end to end", "76 %", "one run of vLLM", _BLIS),
    ("roofline", "end to end", "29 to 42 %", "15 runs of vLLM on H100", _BLIS),
    ("BLIS", "first token", "31.5 %", "360 rows of such tables", _BLIS),
    ("BLIS", "end to end", "18 %", "18 stages of 9 vLLM servers", _BLIS),
    ("BLIS", "first token", "17.6 %", "unseen models, vLLM on H100", _BLIS),
    (
        *("AIConfigurator", "end to end", "15 %", "18 stages of 9 vLLM servers"),
        "github.com/ai-dynamo/aiconfigurator",
    ),
    ("BLIS", "time per token", "11.9 %", "360 rows of such tables", _BLIS),
    ("BLIS", "end to end", "6.7 %", "unseen models, vLLM on H100", _BLIS),
    (
        *("LLMServingSim", "end to end", "1 to 2 %", "4 servers, layers profiled"),
        "github.com/casys-kaist/LLMServingSim",
    ),
)


def published_sheet() -> Sheet:
    """Returns the table of published errors, the largest first."""
    note = (
        "Errors that authors of a simulator report, for it or another one. Rows, fits "
        "and statistics differ from those of this page, except the roofline's column, "
        "which is computed on the same rows."
    )
    heads = ("simulator", "quantity", "error", "of", "source")
    return Sheet("published errors of other simulators", heads, _ROWS, note)
