"""Conversations: which ones can be rendered, and the chat template that renders them."""
