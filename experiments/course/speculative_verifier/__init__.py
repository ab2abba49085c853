"""Assignment: a verifier of draft tokens that preserves the distribution."""
