"""Past one device: a model and its pages divided over a mesh."""

from jaxkv.parallel.mesh import count_cpu_as, make_mesh

__all__ = [
    "collectives",
    "count_cpu_as",
    "experts",
    "layout",
    "make_mesh",
    "mesh",
    "processes",
    "sequence",
    "tensor",
]
