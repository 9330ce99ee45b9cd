"""Judge answers to published tasks: mathematics, code in SQL, questions, a judge model."""
