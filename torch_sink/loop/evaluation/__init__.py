"""Evaluation beside training: metrics, and how models are judged."""
