"""Experiments that train and fit."""
