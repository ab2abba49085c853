"""Peers in processes of their own: other systems, each in its interpreter."""
