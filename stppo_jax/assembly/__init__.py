"""The names in a config become objects.

components.py   environment, retriever, reward, tools, tasks and tokenizer
agents.py       the agent that plays the episodes
"""
