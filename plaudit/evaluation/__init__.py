"""`plaudit eval`: how good is a reward model, a judge, a verifier, a policy?"""
