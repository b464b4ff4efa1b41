"""Sentences for the embeddings: the two of a pair mean about the same, and pairs have subjects in common."""

from __future__ import annotations

PAIRS = (
    ("A man is eating food.", "Somebody has a meal."),
    ("A man is riding a horse.", "Someone sits on a horse and rides."),
    ("A woman is playing the violin.", "She performs a piece on her fiddle."),
    ("The girl carries a baby.", "A child is holding an infant."),
    ("Two boys are kicking a ball in the park.", "Children play football on the grass."),
    ("The chef slices onions for the soup.", "A cook is cutting vegetables."),
    ("The cat sleeps on the sofa.", "Our kitten is napping on the couch."),
    ("A dog runs along the beach.", "The puppy races over the sand."),
    ("How do I reset my password?", "I forgot my login and need a new one."),
    ("The app crashes when I open a file.", "Opening a document makes the program quit."),
    ("My phone does not charge any more.", "The battery of my mobile stays empty."),
    ("The update made my computer slow.", "Since the new version my laptop takes ages."),
    ("Interest rates rose again in March.", "The central bank made borrowing dearer in spring."),
    ("The stock market fell on Monday.", "Shares lost value at the start of the week."),
    ("The company reported record profits.", "The firm earned more than ever before."),
    ("Unemployment is at its lowest in ten years.", "Fewer people are out of work than for a decade."),
    ("The bridge was closed after the storm.", "Bad weather shut the crossing."),
    ("Heavy rain flooded the village.", "The town was under water after the downpour."),
    ("It will be sunny and warm tomorrow.", "Tomorrow's forecast is bright and mild."),
    ("The volcano erupted for the third time this year.", "Lava came out of the mountain once more."),
    ("The new vaccine protects against the flu.", "An injection prevents influenza."),
    ("Regular exercise lowers blood pressure.", "Training often is good for the heart."),
    ("The patient complained of a headache.", "He told the doctor that his head hurt."),
    ("Eating too much sugar harms your teeth.", "Sweets are bad for the enamel."),
    ("The court found him guilty of fraud.", "He was convicted of cheating investors."),
    ("The minister resigned after the scandal.", "The politician stepped down over the affair."),
    ("The two countries signed a peace treaty.", "The war ended with an agreement."),
    ("Voters go to the polls on Sunday.", "The election is held at the weekend."),
    ("The telescope photographed a distant galaxy.", "Astronomers took a picture of faraway stars."),
    ("Water boils at a lower temperature on a mountain.", "At altitude the boiling point drops."),
    ("The train to Berlin leaves at nine.", "The railway service for Germany's capital departs at 9."),
    ("We booked a hotel near the station.", "Our rooms are close to the railway."),
)
SENTENCES = tuple(sentence for pair in PAIRS for sentence in pair)
