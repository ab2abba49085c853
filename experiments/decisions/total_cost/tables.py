"""Tables of results: loads, prices, servers, and closed forms."""

import numpy as np

from experiments import lab


class ClosedForms(lab.ResultTable):
    """Optima for 2 N operations per token."""

    aim: lab.Texts = lab.column("loss or budget")
    inference_tokens: lab.Floats = lab.column(
        "tokens served", heading="tokens served", form="{:.3g}"
    )
    num_params: lab.Floats = lab.column("best size", heading="N", form="{:.3g}")
    exact_params: lab.Floats = lab.column(
        "the same in closed form", heading="exact", form="{:.4g}"
    )
    error: lab.Floats = lab.column(
        "largest relative difference of N, D, loss and cost", form="{:.1e}"
    )


class LoadRows(lab.ResultTable):
    """The best model for each load and aim, and by other rules."""

    aim: lab.Texts = lab.column("loss or budget")
    rate_per_s: lab.Floats = lab.column("rate", heading="requests/s")
    num_params: lab.Floats = lab.column("best size", heading="N", form="{:.3g}")
    params_low: lab.Floats = lab.column(
        "5 % of the draws", heading="N, 5 %", form="{:.3g}"
    )
    params_high: lab.Floats = lab.column(
        "95 % of the draws", heading="N, 95 %", form="{:.3g}"
    )
    num_tokens: lab.Floats = lab.column("training tokens", heading="D", form="{:.3g}")
    tokens_low: lab.Floats = lab.column("5 % of the draws")
    tokens_high: lab.Floats = lab.column("95 % of the draws")
    loss: lab.Floats = lab.column("its loss", form="{:.4f}")
    loss_low: lab.Floats = lab.column("5 % of the draws")
    loss_high: lab.Floats = lab.column("95 % of the draws")
    cost_usd: lab.Floats = lab.column("both", heading="both [USD]", form="{:.4g}")
    cost_low_usd: lab.Floats = lab.column("5 % of the draws")
    cost_high_usd: lab.Floats = lab.column("95 % of the draws")
    serving_usd: lab.Floats = lab.column(
        "serving", heading="serving [USD]", form="{:.4g}"
    )
    serving_joules: lab.Floats = lab.column("energy of serving in J")
    true_params: lab.Floats = lab.column(
        "best size by the true law", heading="true law", form="{:.3g}"
    )
    whole_params: lab.Floats = lab.column(
        "best size if whole servers are paid", heading="whole servers", form="{:.3g}"
    )
    training_excess: lab.Floats = lab.column(
        "cost of the compute optimum of that loss over the best, minus 1",
        heading="cost of the compute optimum",
        form="{:+.1%}",
    )
    closed_excess: lab.Floats = lab.column(
        "the same for 2 N operations per token",
        heading="of 2 N per token",
        form="{:+.1%}",
    )


class TrafficRows(lab.ResultTable):
    """The best model for kinds of requests, and for 2 N operations per token."""

    traffic: lab.Texts = lab.column("tokens of prompt and answer, and limits in s")
    rate_per_s: lab.Floats = lab.column("rate", heading="requests/s")
    num_params: lab.Floats = lab.column("best size", heading="N", form="{:.3g}")
    closed_params: lab.Floats = lab.column(
        "best size for 2 N operations per token", heading="2 N per token", form="{:.3g}"
    )
    cost_usd: lab.Floats = lab.column("both", heading="both [USD]", form="{:.4g}")
    serving_share: lab.Floats = lab.column(
        "share of serving", heading="serving", form="{:.1%}"
    )
    used_share: lab.Floats = lab.column(
        "2 N operations per token over the peak, at the best size",
        heading="MFU",
        form="{:.1%}",
    )
    training_excess: lab.Floats = lab.column(
        "cost of the compute optimum of that loss over the best, minus 1",
        heading="cost of the compute optimum",
        form="{:+.1%}",
    )
    closed_excess: lab.Floats = lab.column(
        "the same for 2 N operations per token",
        heading="of 2 N per token",
        form="{:+.1%}",
    )


class PriceRows(lab.ResultTable):
    """The best model by price of serving."""

    aim: lab.Texts = lab.column("loss or budget")
    factor: lab.Floats = lab.column("price over the offer's", form="{:g}")
    num_params: lab.Floats = lab.column("best size", heading="N", form="{:.3g}")
    loss: lab.Floats = lab.column("its loss", form="{:.4f}")
    cost_usd: lab.Floats = lab.column("both", heading="both [USD]", form="{:.4g}")


class ServerRows(lab.ResultTable):
    """The cheapest server of each size at its largest load; some are simulated."""

    num_params: lab.Floats = lab.column("size", heading="N", form="{:.3g}")
    num_devices: lab.Ints = lab.column("devices of a server", heading="devices")
    concurrency: lab.Floats = lab.column(
        "requests at a time", heading="at a time", form="{:.0f}"
    )
    requests_per_s: lab.Floats = lab.column(
        "largest load", heading="requests/s", form="{:.3g}"
    )
    low_per_s: lab.Floats = lab.column("5 % of the draws", heading="5 %", form="{:.3g}")
    high_per_s: lab.Floats = lab.column(
        "95 % of the draws", heading="95 %", form="{:.3g}"
    )
    usd_per_thousand: lab.Floats = lab.column(
        "USD of a thousand answers", heading="1,000 answers [USD]", form="{:.3g}"
    )
    request_joules: lab.Floats = lab.column(
        "energy of an answer in J", heading="answer [J]", form="{:.3g}"
    )
    used_share: lab.Floats = lab.column(
        "2 N operations per token over the peak", heading="MFU", form="{:.1%}"
    )
    simulated_per_s: lab.Floats = lab.column(
        "largest load by simulation, median of draws; NaN without one",
        heading="simulated",
        form="{:.3g}",
    )
    simulated_low_per_s: lab.Floats = lab.column(
        "smallest of the draws", heading="smallest", form="{:.3g}"
    )
    simulated_high_per_s: lab.Floats = lab.column(
        "largest of the draws", heading="largest", form="{:.3g}"
    )


class Result(lab.ResultRecord):
    """All loads, prices and servers."""

    powers: np.ndarray = lab.column("A, B, alpha, beta, floor and outer of the law")
    flop_cost: float = lab.column("USD of an operation in training")
    zero_load_error: float = lab.column(
        "largest relative distance from the compute optimum without a load"
    )
    sardana_params: float = lab.column("size in the example of Sardana et al.")
    sardana_saved: float = lab.column("share of the operations that it saves")
    simulated_shift: float = lab.column(
        "largest relative change of N over all loads, if servers take what simulations "
        "of some sizes do; NaN without simulations"
    )
    loads: LoadRows = lab.column(
        "by load",
        heading="the best model by load, and by other rules",
        columns=(
            *("aim", "rate_per_s", "num_params", "params_low", "params_high"),
            *("num_tokens", "loss", "cost_usd", "serving_usd", "true_params"),
            *("whole_params", "training_excess", "closed_excess"),
        ),
        note="Costs of models of the same loss, at the prices of the servers.",
    )
    traffics: TrafficRows = lab.column(
        "by kind of requests",
        heading="kinds of requests, for a loss",
        note="Costs of models of the same loss, at the prices of the servers.",
    )
    prices: PriceRows = lab.column("by price", heading="the best model by price")
    servers: ServerRows = lab.column("by size", heading="servers by size of the model")
    closed_forms: ClosedForms = lab.column(
        "2 N operations per token", heading="closed form and ladder"
    )
