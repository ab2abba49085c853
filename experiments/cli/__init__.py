"""Commands of the laboratory: experiments, benchmarks and claims."""
