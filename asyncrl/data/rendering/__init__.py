"""From a record to the text of its prompt: chat messages, the chat template, and what a user should know of them."""
