"""The three ideas of DeepSeek-V3, trained small, compared with dense models."""
