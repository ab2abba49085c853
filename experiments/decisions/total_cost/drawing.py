"""Figure: best size by load and by price, costs of rules, and loads of servers."""

import numpy as np

from experiments import lab
from experiments.decisions.total_cost.tables import Result

_AIMS = (("loss", 5, "o", "for a loss"), ("budget", 6, "s", "for a budget"))


def plot(axes: np.ndarray, result: Result) -> None:
    """Draws the four panels."""
    loads = result.loads
    for aim, color, mark, name in _AIMS:
        rows = loads.where(aim=aim)
        x = rows.rate_per_s
        ax = axes[0, 0]
        lab.draw_curve(ax, x, rows.num_params, color, name, marker=mark)
        lab.shade_band(
            ax, x, rows.params_low, rows.params_high, lab.colors()[color], 0.2
        )
        ax = axes[0, 1]
        prices = result.prices.where(aim=aim)
        lab.draw_curve(ax, prices.factor, prices.num_params, color, name, marker=mark)
    x = "load [requests/s]"
    y = "best size [parameters]"
    sizes = loads.where(aim="loss").num_params
    fall = sizes[0] / sizes[-1] if sizes.size else 1.0
    title = f"More load, a smaller model: 1/{fall:.1f}"
    lab.set_labels(axes[0, 0], title, x, y, xscale="log", yscale="log")
    title = "A higher price, a smaller model"
    price = "price of serving over the offer [1]"
    lab.set_labels(axes[0, 1], title, price, y, xscale="log", yscale="log")
    rows = loads.where(aim="loss")
    for values, color, mark, name in (
        (rows.training_excess, 2, "v", "compute optimum"),
        (rows.closed_excess, 3, "^", "2 N per token"),
    ):
        excess = 100 * np.maximum(values, 1e-6)
        lab.draw_curve(axes[1, 0], rows.rate_per_s, excess, color, name, marker=mark)
    worst = 100 * rows.training_excess.max() if len(rows) else 0.0
    title = f"The compute optimum is up to {worst:.0f} % dearer"
    y = "cost above the best [%]"
    lab.set_labels(axes[1, 0], title, x, y, xscale="log")
    ax = axes[1, 1]
    servers = result.servers
    per_device = servers.requests_per_s / servers.num_devices
    lab.draw_curve(ax, servers.num_params, per_device, 5, "fit of servers", marker="")
    low = servers.low_per_s / servers.num_devices
    high = servers.high_per_s / servers.num_devices
    lab.shade_band(ax, servers.num_params, low, high, lab.colors()[5], 0.2)
    ran = servers.at(servers.simulated_per_s > 0)
    if len(ran):
        simulated = ran.simulated_per_s / ran.num_devices
        look = {"marker": "D", "linestyle": ""}
        lab.draw_curve(ax, ran.num_params, simulated, 6, "simulated", **look)
    title = "Largest load within the limits"
    size = "size [parameters]"
    lab.set_labels(
        ax, title, size, "goodput of a device [requests/s]", xscale="log", yscale="log"
    )
    axes[0, 1].xaxis.set_major_formatter("{x:g}")
    axes[0, 1].set_xticks(result.prices.where(aim="loss").factor[::2])
    axes[0, 1].set_xticks([], minor=True)
    for ax in axes.flat:
        ax.legend()
