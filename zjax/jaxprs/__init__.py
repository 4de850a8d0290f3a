"""Analysis and transformation of jaxprs."""
