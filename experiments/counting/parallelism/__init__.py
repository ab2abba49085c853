"""Traffic, memory and operations of a device by kind of parallelism."""
