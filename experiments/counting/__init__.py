"""What formulas count, held against what others count or say."""
