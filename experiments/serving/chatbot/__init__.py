"""Chatbot."""
