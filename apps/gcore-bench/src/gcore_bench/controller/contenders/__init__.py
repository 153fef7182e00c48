"""gcore's controllers and verl's driver, each with the workers that they command."""
