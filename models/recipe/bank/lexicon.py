"""Word lists for the kinds of values that have no package of their own."""


def listed(text: str) -> list[str]:
    """The phrases of a text, parted by bars or line ends."""
    return [
        " ".join(part.split())
        for line in text.splitlines()
        for part in line.split("|")
        if part.strip()
    ]


TOWNS = """
Aldeburgh Alnwick Ambleside Appleby Arundel Ashbourne Aylesbury Bakewell Banbury Barnsley Bath Beccles Bedford Berwick
Beverley Bideford Bolton Bridport Brighton Bristol Bude Burnley Buxton Caldbeck Cambridge Cardigan Carlisle Chester Chichester
Cirencester Clitheroe Corbridge Coventry Cromer Darlington Dartmouth Derby Dorchester Dover Dunbar Dundee Durham Ely Evesham
Exeter Falmouth Faversham Folkestone Frome Galway Glastonbury Gloucester Grantham Guildford Halifax Harrogate Hastings Hawick Haworth
Hereford Hexham Huddersfield Hull Huntingdon Ilkley Inverness Ipswich Keighley Kendal Keswick Kettering Kilkenny Lancaster
Launceston Ledbury Leeds Leicester Leominster Lerwick Lewes Lichfield Lincoln Louth Ludlow Luton Maidstone Malton Malvern
Margate Matlock Melrose Middlesbrough Minehead Morpeth Newark Newbury Newport Northampton Norwich Nottingham Oakham Oban
Okehampton Oswestry Otley Oundle Oxford Paisley Penrith Penzance Perth Peterborough Pickering Plymouth Preston Quorn Ramsgate Reading
Redruth Richmond Ripon Rochdale Rugby Ryde Rye Salisbury Scarborough Sedbergh Selby Settle Sheffield Shrewsbury Skipton Sligo
Southwold Stafford Stamford Stirling Stockport Stratford Stroud Sunderland Swanage Swansea Tadcaster Taunton Tavistock Tenby Thirsk
Tiverton Torquay Totnes Truro Ullapool Uppingham Uttoxeter Ventnor Wakefield Wareham Warwick Wells Wexford Weymouth Whitby
Wigan Winchester Windermere Wolverhampton Worcester Workington Yarmouth Yeovil York Aberdeen Akron Albany Albuquerque Amherst Anchorage
Annapolis Ashland Asheville Astoria Atlanta Augusta Austin Baltimore Bangor Barstow Bellingham Bend Billings Boise Boulder
Bozeman Burlington Camden Casper Charleston Chattanooga Cheyenne Cleveland Columbus Concord Dayton Denver Duluth Durango El_Paso Elko Erie
Eugene Evanston Fairbanks Fargo Flagstaff Fresno Galveston Gary Hartford Helena Houston Ithaca Jackson Juneau Kalamazoo
Knoxville Lansing Laramie Lexington Lowell Macon Madison Memphis Milwaukee Missoula Mobile Monterey Nashua Natchez
Oakland Odessa Olympia Omaha Orlando Oxnard Peoria Phoenix Pittsburgh Portland Providence Provo Quincy Raleigh Reno Roanoke
Rochester Sacramento Salem Salinas Santa_Fe Savannah Scranton Seattle Sedona Spokane Springfield Syracuse Tacoma Tampa Toledo
Topeka Tucson Tulsa Utica Vallejo Wichita Winona Yakima Yuma Adelaide Auckland Brisbane Calgary Dunedin Halifax Hobart
Kelowna Moncton Napier Nelson Ottawa Quebec Queenstown Regina Wellington Winnipeg Accra Algiers Amman Antwerp Asmara Athens Baku
Bamako Beirut Bergen Bogotá Bratislava Bruges Cairo Caracas Casablanca Chennai Cusco Dakar Delft Dubrovnik Entebbe Esbjerg Ghent
Graz Haifa Hanoi Havana Izmir Jakarta Kampala Kigali Kochi Kyoto Lagos Leuven Lima Lisbon Ljubljana Lomé Lusaka Luxor Lyon Maputo
Marrakesh Mombasa Montevideo Mumbai Nairobi Nice Oaxaca Odense Oslo Osaka Oulu Petra Piran Porto Prague Qatif Quito Quetta Rabat Riga Rosario
Salzburg Santiago Sapporo Seville Split Tallinn Tampere Tangier Tbilisi Trieste Tromsø Tunis Turin Turku Uppsala Utrecht Valletta
Vilnius Wuhan Xalapa Yerevan Zadar Zagreb Zanzibar Zürich
"""
ROOTS = """
ash thorn stone hollow birch marsh crow fern gold grey hazel iron king lamb long mill moss north oak otter raven red salt
shep silver south swan under wal west white wild winter wolf elder copper bram sedge lark heron harrow cold fair green apple
barrow clover drift ember frost glen quern queen quar quick el ald ing or ut ap eb ock ux ack
"""
TAILS = """
ford wick bridge mere dale ham ton stead worth well by field gate haven holt hurst ley moor port shaw side water wood brook
combe cliff croft den thorpe leigh bury minster mouth stow
"""
STREETS = listed("""
Street | Road | Lane | Avenue | Drive | Close | Way | Terrace | Square | Crescent | Hill | Row | Court | Place | Gardens | Street | Road | Lane |
Boulevard | Walk | Green | Parade | Wharf | Mews
""")
STREET_NAMES = listed("""
Mill | Church | Station | High | Park | Victoria | Quay | Orchard | Albert | Bridge | Chapel | School | Market | Castle | Queen |
King | Elm | Oak | Maple | Cedar | Chestnut | Willow | Birch | Hawthorn | Rowan | Canal | Harbour | Abbey | Manor | Priory |
Rectory | Tannery | Ropewalk | Cannon | Union | Liberty | Franklin | Lincoln | Jackson | Washington | Main | First | Second | Third |
Sycamore | Juniper | Magnolia | Prospect | Pleasant | Spring | Summer | Meadow | Barn | Drovers | Fishergate | Tanner | Cooper |
Baker | Weaver | Ferry | Lighthouse | Beacon | Quarry | Kiln | Foundry | Railway | Viaduct | Observatory | Museum | Garden |
North | South | East | West | Upper | Lower | Old Mill | Long | Broad | Cross | Green | Silver | Gold | Copper | Ivy | Holly | Laurel
""")
BUILDINGS = listed("""
Farm | House | Hall | Lodge | Barn | Cottage | Manor | Mill | Court | Grange | Inn | Arms | Centre | Pavilion | Tower | Works |
Wharf | Chapel | Abbey | Castle | Stables | Nursery | Hotel | Gallery | Theatre | Yard | Studios | Depot | Library | Priory | Observatory
""")
BUILDING_NAMES = listed("""
Ashdown | Brookside | Hawthorn | Quarry | Riverside | Hillcrest | Old Forge | Kingfisher | Meadowbank | Northgate | Eastfield | Elm |
Underwood | Uplands | Orchard | Inglewood | Ivy | Overton | Quayside | Seaview | Woodlands | Fairview | Copperfield | Lavender |
Windmill | Bluebell | Foxglove | Otter | Heron | Badger | Swallow | Skylark | Raven | Wheatsheaf | Plough | Anchor | Victoria |
St Anne's | St Mark's | St Oswald's | All Saints | Albion | Alexandra | Assembly | Customs | Exchange | Guild | Jubilee | Unity | Zetland
""")
COMPANY_TAILS = listed("""
Ltd | Limited | & Sons | & Co | Inc. | LLC | GmbH | Group | Partners | Logistics | Engineering | Foods | Textiles | Instruments | Systems |
Software | Analytics | Energy | Motors | Marine | Press | Publishing | Robotics | Pharma | Builders | Roofing | Plumbing | Electrical | Travel |
Transport | Freight | Bakery | Brewery | Coffee | Dairy | Timber | Glass | Steel | Tools | Cycles | Optics | Labs | Studios | Media | Films |
Consulting | Holdings | Insurance | Bank | Airways | Shipping | Outdoors | Interiors | Ceramics | Paper | Seeds | Joinery | Catering
""")
COINED = "Ac Al Am Ax Ar Bel Bri Cal Cor Dex Div Ec El Em Ev Fi Flu Gal Hal Hex In Io Jun Kal Ke Lu Lum Mer Mon Na Neo Nor Nov O Om Or Os Pa Per Pix Qu Qua Qui Ra Rel Rho Sa Sol Syn Tal Ter Tri U Ul Um Un Va Vel Ver Vi Vo Wen Xe Ya Zan Zep Zi"
COINED_ENDS = "ta ro lia via na dia mo sta nto nyx rix lis dora vix don tec ra ma zo mira lix gen tis ble by ly que iva ora una eon ium iq"
PRODUCT_TAILS = listed("""
Pro | Mini | Plus | Max | Air | One | Duo | 2 | 3 | 300 | 500 | X | XL | S | Lite | Classic | Home | Go | Touch | Ultra | Compact | Flex | Mk II | 7 | 90
""")
PRODUCT_WORDS = listed("""
Quietline | AquaPure | Breeze | Stormlight | TrailMaster | EverSharp | Pocketchef | Nightowl | Sunspot | Brightdesk | Cloudstep | Firefly | Oakline |
Icebreaker | Urbanist | Easygrip | Overland | Ironhide | Quickfix | Quartz | Ember | Arrow | Orbit | Unison | Echo | Acorn | Harvester | Pathfinder | Lantern
""")
JOBS = listed("""
accountant | actor | architect | archivist | astronomer | baker | barber | beekeeper | blacksmith | bookbinder | bookseller | botanist | bricklayer | bus driver |
butcher | carpenter | cartographer | chef | chemist | civil engineer | cleaner | composer | cook | dancer | data analyst | dentist | designer | dietitian |
electrician | engineer | estate agent | farmer | ferry pilot | firefighter | fisherman | florist | forester | gardener | geologist | glazier | goldsmith | graphic designer |
hairdresser | historian | illustrator | interpreter | janitor | joiner | journalist | judge | lawyer | librarian | locksmith | machinist | mechanic | midwife | miner |
musician | night porter | nurse | optician | organist | paramedic | pastry cook | pharmacist | photographer | physiotherapist | pilot | plasterer | plumber |
postman | potter | printer | radiographer | receptionist | roofer | saddler | sailor | sculptor | secretary | shepherd | shop assistant | singer | social worker |
software developer | stonemason | surgeon | surveyor | tailor | taxi driver | teacher | thatcher | train driver | translator | umbrella maker | undertaker | upholsterer | vet | violin maker | waiter |
watchmaker | weaver | web designer | welder | youth worker | zookeeper
""")
COLOURS = listed("""
red | blue | green | yellow | white | black | grey | orange | purple | pink | brown | silver | gold | crimson | turquoise | violet | cream | scarlet | teal | amber |
ivory | navy | sage green | pale blue | dark red | bottle green | off-white | charcoal | mustard | olive | maroon | beige | lilac | peach | rust | sky blue | racing green |
burgundy | indigo | lemon yellow | dusty pink | royal blue | terracotta | mint green | plum | khaki | copper | emerald | ochre | aquamarine | apricot | ultramarine | umber
""")
MATERIALS = listed("""
oak | granite | brick | marble | steel | glass | slate | copper | sandstone | cast iron | pine | limestone | concrete | cedar | bronze | clay | linen | cotton |
wool | leather | bamboo | aluminium | plywood | canvas | felt | paper | ceramic | porcelain | walnut | beech | silk | titanium | brass | recycled plastic | cork | rubber | ash | elm |
stainless steel | polyester | velvet | wicker | zinc | plaster | straw | flint | teak | maple | carbon fibre
""")
ANIMALS = listed("""
cat | dog | horse | donkey | parrot | goat | owl | goose | mule | pony | sheepdog | raven | tortoise | hedgehog | badger | otter | fox | heron | kingfisher | salmon |
barn owl | red squirrel | hare | adder | newt | bat | deer | seal | puffin | gannet | beaver | alpaca | llama | peacock | duck | swan | ferret | rabbit | hamster |
guinea pig | iguana | eel | trout | bumblebee | dragonfly | lapwing | curlew | skylark | osprey | wolf | lynx | moose | elk | ibex | antelope | ostrich | emu | koala | quail | urchin | oyster
""")
PETS = """
Biscuit Pepper Luna Milo Oscar Bella Ziggy Pip Cobweb Wilf Juno Otis Archie Daisy Rex Ruby Smudge Tigger Bramble Hazel Monty Nelly Olive Percy
Queenie Rocky Shadow Toffee Umber Violet Waffles Yoyo Zorro Ace Angus Arlo Barney Basil Bertie Bonnie Buster Casper Chester Clover Coco Dash Dexter
Dotty Echo Elvis Fern Fidget Freya Ginger Gizmo Goldie Hobbes Honey Igor Indie Inky Iris Jasper Jet Kipper Lotus Maple Mittens Mochi Nacho Nutmeg Ollie Otto
Peanut Poppy Quill Quaver Rusty Saffron Scout Sooty Sorrel Tango Teddy Ursa Vesper Widget Willow Winnie
"""
FOODS = listed("""
lentil soup | apple pie | cheese scones | pancakes | fried rice | plum cake | noodles | porridge | dumplings | lamb stew | toast | potato salad | bread pudding | stuffed mushrooms |
omelettes | waffles | roast chestnuts | chicken curry | ginger biscuits | flapjacks | fish pie | goulash | paella | risotto | falafel | hummus | pierogi | jollof rice | samosas |
pad thai | shepherd's pie | mac and cheese | tomato soup | pumpkin bread | rye bread | sourdough | oatcakes | lemon tart | rhubarb crumble | trifle | baked beans | onion rings | ramen | spring rolls |
tacos | burritos | moussaka | ratatouille | quiche | quince jam | apricot tart | egg sandwiches | olives | oysters | ice cream | vegetable lasagne | borscht | empanadas | kebabs | clam chowder
""")
DRINKS = listed("""
ginger tea | black coffee | apple juice | elderflower cordial | hot chocolate | lemonade | cider | mulled wine | green tea | orange squash | sparkling water | oat milk latte | espresso |
iced tea | tomato juice | root beer | mint tea | rosehip syrup | ale | buttermilk | cranberry juice | kombucha | chai | malt whisky | plum brandy | mango lassi | stout | sherry | rooibos | horchata
""")
PLANTS = listed("""
lavender | rosemary | foxglove | hawthorn | sweet pea | thyme | oak | silver birch | bluebell | snowdrop | ivy | holly | rhubarb | basil | sunflower | marigold | hollyhock | wisteria | clematis |
honeysuckle | sorrel | mint | fennel | yarrow | teasel | heather | gorse | orchid | iris | tulip | dahlia | aster | primrose | nettle | willow | elder | rowan | juniper | magnolia |
camellia | rhododendron | bamboo | fern | oleander | quince | apple | pear | plum | runner bean | courgette | beetroot | kale | garlic | asparagus | artichoke | eucalyptus
""")
LANGUAGES = """
Welsh English French German Spanish Italian Polish Czech Urdu Hindi Bengali Arabic Turkish Finnish Swedish Norwegian Danish Dutch Irish Basque Catalan Greek
Hebrew Japanese Korean Mandarin Cantonese Swahili Yoruba Igbo Zulu Amharic Tamil Telugu Punjabi Gujarati Nepali Thai Vietnamese Indonesian Malay Tagalog Persian Ukrainian
Russian Romanian Hungarian Estonian Latvian Lithuanian Icelandic Portuguese Quechua Uzbek Georgian Armenian Albanian
"""
INSTRUMENTS = listed("""
violin | flute | piano | snare drum | trumpet | cello | guitar | harp | organ | clarinet | oboe | banjo | accordion | French horn | fiddle | bassoon | viola | trombone |
tuba | saxophone | double bass | ukulele | mandolin | harpsichord | recorder | tin whistle | bagpipes | sitar | tabla | xylophone | marimba | lute | euphonium | oud | koto
""")
SPORTS = listed("""
football | cricket | rugby | hockey | netball | tennis | badminton | rowing | swimming | cycling | archery | fencing | judo | karate | table tennis | volleyball | basketball |
baseball | softball | bowls | croquet | curling | golf | squash | climbing | sailing | ice skating | handball | lacrosse | orienteering | gymnastics | water polo | ultimate frisbee
""")
HOBBIES = listed("""
chess | sailing | watercolour painting | running | baking | gardening | choral singing | rowing | fly fishing | climbing | reading | salsa dancing | skating | cycling | knitting | wild swimming |
wood carving | archery | fencing | pottery | juggling | birdwatching | stargazing | quilting | calligraphy | origami | model railways | beekeeping | crosswords | geocaching | bell ringing | metal detecting |
astronomy | embroidery | upholstery | astrology | urban sketching | amateur radio | orienteering | improv | home brewing
""")
SUBJECTS = listed("""
chemistry | algebra | Roman history | marine biology | economics | philosophy | statistics | geology | art history | linguistics | computer science | astronomy | botany | civil engineering |
music theory | law | medicine | nursing | anthropology | physics | geography | drama | ethics | archaeology | accounting | electronics | textile design | urban planning | psychology | food science |
world literature | genetics | robotics | veterinary science | journalism | theology | calculus | ecology | optics | agriculture
""")
VEHICLES = listed("""
van | lorry | minibus | bicycle | tractor | motorbike | pickup truck | cargo bike | tram | ambulance | fire engine | taxi | coach | scooter | camper van | milk float | forklift | hatchback |
estate car | jeep | snow plough | tandem | trailer | rowing boat | canoe | hovercraft | unicycle | electric car | dumper truck | mobile library
""")
ROOMS = listed("""
kitchen | main hall | committee room | library | back office | attic | cellar | gym | music room | conservatory | reading room | staff room | workshop | chapel | canteen | north wing |
upper gallery | boiler room | pantry | laundry | garage | ballroom | lecture theatre | boardroom | sun lounge | map room | press room | archive | art studio | entrance lobby | storeroom | observatory | orangery |
utility room | old dairy | east wing | infirmary
""")
TEAM_TAILS = listed("""
Rovers | United | City | Wanderers | Athletic | Falcons | Tigers | Harriers | Eagles | Bears | Wolves | Otters | Hornets | Rangers | Town | Lions | Comets | Owls | Juniors | Chargers | Ladies | Pirates
""")
EVENTS = listed("""
Summer Fair | Harvest Supper | Spring Concert | Half Marathon | Book Festival | Winter Market | Lantern Parade | Open Day | Jazz Night | Craft Fair | Regatta | Film Week |
Poetry Evening | Flower Show | Science Day | Food Festival | Quiz Night | Beer Festival | Cycle Race | Kite Day | Apple Day | Carnival | Sculpture Trail | Folk Weekend | Chess Open | Dog Show |
Charity Auction | Garden Party | Midsummer Dance | Careers Fair | Tool Swap | Oyster Festival | Antiques Fair | Air Show
""")
ORGANISATIONS = listed("""
Historical Society | Allotment Society | Civic Trust | Rotary Club | Wildlife Trust | Music Society | Chess Club | Cycling Club | Choral Society | Residents' Association | Parish Council | Food Bank | Youth Club |
Chamber of Commerce | Film Society | Rowing Club | Women's Institute | Camera Club | Gardening Club | Housing Association | Lifeboat Crew | Ramblers | Astronomy Group | University | College | Hospital Trust |
Arts Council | Scouts | Heritage Fund | Credit Union | Water Board | Institute of Design
""")
SHIPS = listed("""
Lady Quentin | Sea Otter | Aurora | Mary Ellen | Northern Star | Albatross | Providence | Swift | Isabella | Kittiwake | Orion | Petrel | Queen Maud | Rosalind | Endeavour | Stormcock | Undine |
Valiant | Water Gipsy | Ariel | Black Swan | Curlew | Dolphin | Emerald Isle | Fair Wind | Golden Hind | Halcyon | Iolanthe | Jolly Tar | Kestrel | Lorelei | Morning Tide | Nautilus | Osprey | Polar Wind | Quicksilver |
Resolute | Silver Darling | Tern | Venture | Wanderer
""")
BOOK_WORDS = listed("""
Glass | Orchard | Winter | Salt | Lantern | River | Clockmaker | Garden | Silence | Island | Map | Bridge | Harvest | Ember | Letter | Shadow | Tide | Crown | Stranger | Quilt | Oracle | Apple | Umbrella |
Astronomer | Daughter | Mirror | Sparrow | Train | Key | House | Kingdom | Thief | Storm | Atlas | Bell | Cartographer | Queen | Echo | Iron | Owl
""")
REGIONS = listed("""
Cumbria | Cornwall | Devon | Norfolk | Northumberland | Kent | Shropshire | Somerset | Fife | Sutherland | Powys | Gwynedd | Connemara | Antrim | Ulster | Orkney | Dorset | Essex | Suffolk | Yorkshire | Argyll |
Vermont | Oregon | Ohio | Iowa | Utah | Idaho | Nevada | Montana | Alaska | Maine | Texas | Kansas | Ontario | Alberta | Quebec | Tasmania | Queensland | Otago | Bavaria | Saxony | Tyrol | Brittany | Provence | Alsace | Umbria |
Tuscany | Sicily | Andalusia | Galicia | Catalonia | Silesia | Moravia | Transylvania | Lapland | Jutland | Skåne | Anatolia | Kerala | Punjab | Assam | Hokkaido | Oaxaca | Patagonia | Bahia | Zululand | Oromia
""")
FILE_WORDS = "report budget minutes draft summary invoice agenda schedule notes floorplan survey orders contract backup export holiday menu newsletter archive update index quality audit roster inventory"
FILE_ENDS = "pdf docx xlsx txt csv md jpg png zip pptx json yaml"
NUMBER_WORDS = "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen twenty"
MONTHS = "January February March April May June July August September October November December"
WEEKDAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday"
