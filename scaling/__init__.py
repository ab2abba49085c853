"""Which model to build: costs, laws, training and the budgets between them."""
