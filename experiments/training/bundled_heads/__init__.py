"""Training of the bundled Medusa and EAGLE heads."""
