"""The three ideas of DeepSeek-V3, trained small beside dense models."""
