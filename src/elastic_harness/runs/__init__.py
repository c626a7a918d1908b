"""A run's folder and its records: who writes them, who reads them, and what they prove."""
