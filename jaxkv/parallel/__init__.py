"""Parallelism: a model and its pages divided over a mesh of devices."""

from jaxkv.parallel.mesh import make_mesh, set_cpu_devices

__all__ = [
    "collectives",
    "experts",
    "layout",
    "make_mesh",
    "mesh",
    "processes",
    "sequence",
    "set_cpu_devices",
    "tensor",
]
