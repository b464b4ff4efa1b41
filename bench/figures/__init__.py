"""Measured figures as the pages of docs/ show them: tables between two marks, and drawings."""
