"""The study of gcore-placement's open questions: simulations that take half an hour."""
